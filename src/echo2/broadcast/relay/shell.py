"""A relay around its core: sockets, threads, files, and the clock.

Invariant: every decision is the core's, taken under one lock; threads only carry bytes and say what happened.

    doors ─▶ greeted peers ─▶ wires (a thread each) ─▶ Node (and the seed's Director) ─▶ dials, files, words
                                                         ▲
                                              timer, the program's orders
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay import control as c
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay import links as ln
from echo2.broadcast.relay import sockets
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.broadcast.relay.doors import Doors, Threads
from echo2.broadcast.relay.files import Files
from echo2.broadcast.relay.node import Node
from echo2.broadcast.relay.seed import Seed
from echo2.broadcast.relay.wires import Wires
from echo2.broadcast.signing import open_signed
from echo2.errors import DiskFull, IntegrityError, Malformed

TICK_S = 0.1


class RelayShell:
    """The inside of a relay process. ``say`` is called from many threads."""

    def __init__(self, order: c.Open, say: Callable[[c.Word], None]) -> None:
        """Raises IntegrityError for certificates that do not belong together."""
        self._order = order
        self._say = say
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._threads = Threads()
        self._doors = Doors(order, self._threads, self._meet, say)
        self._wires = Wires()
        is_seed = not order.seed_host
        self._files = Files(Path(order.folder), owns=not is_seed)
        seed = None if is_seed else f.Source(SEED, order.seed_host, order.seed_port)
        self._node = Node(order.node_id, seed, sockets.lanes_needed(), time.monotonic(), secrets.randbits(31))
        self._seed = Seed(order.topology, order.gamma, order.advertised_host) if is_seed else None

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> int:
        """Listen; return the port. Raises OSError."""
        port = self._doors.open()
        self._threads.start(self._files.work, "files")
        self._threads.start(self._tick_all, "timer")
        return port

    def close(self) -> None:
        """Hang up everywhere and wait, briefly, for the threads."""
        self._closing.set()
        self._doors.close()
        for wire in self._wires.all():
            wire.hang_up("this relay is closing")
        self._files.close()
        self._threads.join()

    def obey(self, order: c.Order) -> None:
        """Raises IntegrityError for a manifest that this run's key did not sign or a file that is not its object."""
        match order:
            case c.Publish(signed, path):
                manifest = open_signed(signed, self._order.manifest_key)
                self._files.adopt(manifest, Path(path))
                with self._lock:
                    self._node.publish(manifest, time.monotonic())
                    if self._seed is not None:
                        self._seed.publish(manifest, signed, time.monotonic())
            case c.Bring(signed):
                manifest = open_signed(signed, self._order.manifest_key)
                with self._lock:
                    self._node.bring(manifest, time.monotonic())
            case c.Withdraw(root):
                with self._lock:
                    self._node.withdraw(root)
                    if self._seed is not None:
                        self._seed.withdraw(root)
            case c.Expel(node_id):
                with self._lock:
                    for wire in self._wires.expel(node_id):
                        wire.hang_up("the run set this node aside")
            case c.Hold(roots):
                with self._lock:
                    self._node.hold(roots)
            case _:
                raise Malformed(f"a relay that is open does not take {type(order).__name__}")
        self._act()

    def _tick_all(self) -> None:
        """Consumes time until the relay closes."""
        while not self._closing.wait(TICK_S):
            now = time.monotonic()
            tally, unreachable = None, list[tuple[f.Source, int]]()
            with self._lock:
                carried = self._wires.look(now)
                self._node.tick({number: here for number, (_, here) in carried.items()}, now)
                if self._seed is not None:
                    there = {number: there for number, (there, _) in carried.items()}
                    tally = self._seed.tick(there, self._node, now)
                    unreachable = self._seed.probes_due(now)
            for source, number in unreachable:
                self._probe(source, number)
            if tally is not None:
                self._say(tally)
            self._act()

    # ---- what the core wants -----------------------------------------------------------------------------------

    def _act(self) -> None:
        with self._lock:
            if self._seed is not None:
                self._seed.send(self._node, time.monotonic())
            for action in self._node.take():  # under the lock: files are opened and closed in the core's order
                self._do(action)

    def _do(self, action: ln.Action) -> None:
        match action:
            case ln.Wake(link):
                if (wire := self._wires.get(link)) is not None:
                    wire.wake()
            case ln.Pace(link, bytes_per_s):
                if (wire := self._wires.get(link)) is not None:
                    wire.pace(bytes_per_s)
            case ln.Hangup(link, why):
                if (wire := self._wires.get(link)) is not None:
                    wire.hang_up(why)
            case ln.Dial(source, lane):
                self._doors.dial(source, lane, lambda why, missed: self._dial_failed(source, lane, why, missed))
            case ln.OpenFile(manifest):
                root = manifest.object_root
                self._files.make(manifest, self._file_opened, lambda why, wish: self._not_opened(root, why, wish))
            case ln.CloseFile(root):
                self._files.drop(root)
            case ln.Say(word):
                if isinstance(word, c.Whole | c.Stuck):
                    word = msgspec.structs.replace(word, path=str(self._files.path(word.root)))
                self._say(word)

    def _dial_failed(self, source: f.Source, lane: int, why: str, missed: bool) -> None:
        with self._lock:
            self._node.dial_failed(source.node_id, lane, why, time.monotonic(), missed)
        self._act()

    def _file_opened(self, file: ChunkFile, wish: int) -> None:
        root = file.manifest.object_root
        here = bytearray(file.has(number) for number in range(file.count))
        with self._lock:
            if self._files.is_newest(root, wish):
                self._node.opened(root, here, time.monotonic())
        self._act()

    def _not_opened(self, root: str, why: str, wish: int) -> None:
        with self._lock:
            if self._files.is_newest(root, wish):
                self._node.file_failed(root, why)
        self._act()

    def _file_failed(self, file: ChunkFile, why: str) -> None:
        root = file.manifest.object_root
        with self._lock:
            if self._files.get(root) is file:  # else it is the file of an earlier life of the object
                self._node.file_failed(root, why)
        self._act()

    # ---- peers -------------------------------------------------------------------------------------------------

    def _meet(self, greeted: sockets.Greeted, outbound: bool) -> None:
        """Be the thread of the peer's connection until it ends."""
        now = time.monotonic()
        with self._lock:
            wire = None if self._closing.is_set() else self._wires.make(greeted, self)
            if wire is None:
                greeted.sock.close()
                if outbound:
                    self._node.dial_failed(greeted.peer, greeted.lane, "too many connections", now, missed=False)
                return
            number = wire.number
            self._node.link_up(number, greeted.peer, outbound, greeted.lane, now)
            joins = self._seed is not None and not outbound and greeted.lane == 0
            if joins and self._seed is not None:
                source = self._seed.link_up(number, greeted.peer, greeted.host, greeted.port, now)
                self._probe(source, number)
        self._act()
        wire.run()
        with self._lock:
            self._wires.forget(wire, greeted.peer)

    def _probe(self, source: f.Source, number: int) -> None:
        """Whether others can dial this node is tried, not asked (field report H11)."""
        self._doors.try_later(source, lambda reachable: self._probed(source, number, reachable))

    def _probed(self, source: f.Source, number: int, reachable: bool) -> None:
        with self._lock:
            assert self._seed is not None, "only the seed probes"
            self._seed.probed(source, number, reachable, time.monotonic())
        self._act()

    # ---- what wires say ----------------------------------------------------------------------------------------

    def next_frame(self, number: int, buffer: bytearray) -> memoryview | bytes:
        with self._lock:
            out = self._node.next_out(number, time.monotonic())
        match out:
            case None:
                return b""
            case bytes():
                return out
            case ln.PaddingOut(nbytes):
                return f.padding(nbytes)
            case ln.ChunkOut():
                return self._chunk_frame(number, out, buffer)

    def _chunk_frame(self, number: int, out: ln.ChunkOut, buffer: bytearray) -> memoryview | bytes:
        file = self._files.get(out.root)
        if file is None:
            return f.padding(0)  # withdrawn since it was chosen
        length = file.length(out.number)
        end = f.HEADER.size + length
        if len(buffer) < end:
            buffer.extend(bytes(end - len(buffer)))
        frame = memoryview(buffer)[:end]
        frame[: f.HEADER.size] = f.chunk_header(out.stream, out.number, length)
        try:
            file.read_into(out.number, frame[f.HEADER.size :])
        except IntegrityError as error:  # somebody cut the file short
            self._file_failed(file, str(error))
            return f.padding(0)
        except OSError as error:  # the disk failed, perhaps only here and now; or the object was withdrawn
            self._cannot_read(number, out, str(error))
            return f.padding(0)
        with self._lock:
            self._node.sent_chunk(length)
        return frame

    def _cannot_read(self, number: int, out: ln.ChunkOut, why: str) -> None:
        """Who asked turns to somebody else, or asks again; others may be luckier with their chunks."""
        self._say(c.Event("relay_read_failed", {"root": out.root[:16], "chunk": out.number, "error": why[:200]}))
        with self._lock:
            self._node.unreadable(number, out.stream)
        self._act()

    def heard(self, number: int) -> None:
        with self._lock:
            self._node.heard(number, time.monotonic())

    def accepts(self, number: int, stream: int, chunk: int, nbytes: int) -> str | None:
        with self._lock:
            return self._node.accepts(number, stream, chunk, nbytes)

    def chunk(self, number: int, root: str, stream: int, chunk: int, data: memoryview) -> None:
        file = self._files.get(root)
        if file is None:
            return None
        if not file.right(chunk, data):
            with self._lock:
                self._node.wrong(number, root, chunk, time.monotonic())
            return self._act()
        try:
            file.put(chunk, data)
        except (DiskFull, OSError) as error:
            return self._file_failed(file, str(error))
        with self._lock:
            self._node.stored(root, stream, chunk, time.monotonic())
        return self._act()

    def control_limit(self, number: int) -> int:
        with self._lock:
            return f.MAX_CONTROL_BYTES if self._node.from_seed(number) else f.MAX_SMALL_BYTES

    def control(self, number: int, frame: f.AnyControl) -> None:
        match frame:
            case f.Assign():
                self._assign(number, frame)
            case f.Report() if self._seed is not None:
                with self._lock:
                    self._seed.report(number, frame, time.monotonic())
            case _:
                with self._lock:
                    self._node.control(number, frame, time.monotonic())
        self._act()

    def _assign(self, number: int, frame: f.Assign) -> None:
        with self._lock:
            if not self._node.from_seed(number):
                raise Malformed("only the seed assigns")
        try:
            manifest = open_signed(frame.manifest, self._order.manifest_key) if frame.manifest else None
            if manifest is not None and manifest.run_id != self._order.run_id:
                raise IntegrityError(f"it must be of run {self._order.run_id}, it is of {manifest.run_id[:80]}")
        except IntegrityError as error:
            self._say(c.Event("relay_bad_manifest", {"error": str(error)[:200]}))
            return
        with self._lock:
            self._node.assign(frame, manifest, time.monotonic())

    def ended(self, number: int, why: str) -> None:
        with self._lock:
            self._node.link_down(number, why, time.monotonic())
            if self._seed is not None:
                self._seed.link_down(number, time.monotonic())
        if not self._closing.is_set():
            self._act()

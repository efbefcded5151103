"""The product: a relay process per host, as the programs run them, driven over their pipes.

Invariant: TLS and hashing are on, as always. Links are warm and rates are known when the clock starts, as after any
earlier publish; it starts just before the seed is told to publish, and stops for a worker when its relay says that it
has every chunk, verified and stored.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

import msgspec
from bench.wan.measure import FAULT_AT, SEED_HOST, Fault
from bench.wan.network import Network
from bench.wan.objects import WireObject, decoded_root, write_object
from bench.wan.processes import Broken, Processes

from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay.control import (
    AnyWord,
    Event,
    Hold,
    Listening,
    Open,
    Order,
    Publish,
    Tally,
    Whole,
    Withdraw,
)  # fmt: skip
from echo2.broadcast.signing import generate_key, public_key
from echo2.transport.tls import ensure_authority, issue_peer_certificate, new_peer_key

_RUN_ID = "bench"
_GAMMA = 1.1
_START_S = 60.0
_SETTLE_S = 2.0
"""Between objects: the seed hears what the workers hold by then, and links are idle, not fresh."""
_ON_ITS_WAY_S = 0.2
"""A tally that is read so soon after an order may have been written before it."""
_IMPORT_S = 0.5
"""Per process, before the first is opened: real hosts do not share a processor while they start."""
_MEASURED_S = 15.0
"""After the last node joined: links are warmed, and the seed measures its uplink, which two workers cannot fill."""
_DECODER: msgspec.msgpack.Decoder[AnyWord] = msgspec.msgpack.Decoder(AnyWord)


class Relays:
    """Context manager; see ``scheme.Scheme``."""

    def __init__(self, network: Network, workers: int, topology: Topology, name: str) -> None:
        self._network = network
        self._hosts = {SEED_HOST: SEED, **{host: f"worker-{host}" for host in range(1, workers + 1)}}
        self._workers = list(self._hosts)[1:]
        self._topology = topology
        self.processes = Processes(network, name)
        self._key = generate_key()
        self._object: WireObject | None = None
        self._version = 0
        self._held = decoded_root(0, 1)
        self._seed_tally: Tally | None = None
        self._planned: Tally | None = None
        """The first tally after the newest object was published."""
        self._planned_from_s = 0.0
        self._events: list[dict[str, Any]] = []

    def __enter__(self) -> Self:
        self.processes.__enter__()
        self._authority = self.processes.folder(SEED_HOST) / "authority"
        authority = ensure_authority(self._authority, datetime.now(UTC))
        for host in self._hosts:
            self.processes.start(host, "echo2.broadcast.relay")
        time.sleep(_IMPORT_S * len(self._hosts))
        self._open(SEED_HOST, authority, 0)
        port = self._listening({SEED_HOST})
        for host in self._workers:
            self._open(host, authority, port)
            self._send(host, Hold((self._held,)))
        self._listening(set(self._workers))
        until_s = time.monotonic() + _START_S
        while self._seed_tally is None or len(self._seed_tally.nodes) < len(self._workers):
            self._hear(until_s)
        self._rest(_MEASURED_S if len(self._workers) > 2 else 1.0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.__exit__(kind, error, trace)

    def prepare(self, nbytes: int) -> None:
        """Make the next object, forget the last one, and let everything come to rest."""
        if self._object is not None:
            for host in self._hosts:
                self._send(host, Withdraw(self._object.manifest.object_root))
            self._object.path.unlink()
        self._version += 1
        folder = self.processes.folder(SEED_HOST)
        self._object = write_object(folder, _RUN_ID, self._key, self._version, nbytes, self._held)
        self._rest(_SETTLE_S)

    def distribute(self, until_s: float, fault: Fault | None) -> tuple[dict[int, float], int | None]:
        assert self._object is not None, "prepared"
        root = self._object.manifest.object_root
        arrived: dict[int, float] = {}
        began_s = time.monotonic()
        self._planned, self._planned_from_s = None, began_s + _ON_ITS_WAY_S
        self._send(SEED_HOST, Publish(self._object.signed, str(self._object.path)))
        victim: int | None = None
        waiting = set(self._workers)
        while waiting:
            host, word, read_s = self._hear(until_s, waiting)
            if isinstance(word, Whole) and word.root == root and host in waiting:
                waiting.discard(host)
                arrived[host] = read_s - began_s
            elif fault and isinstance(word, Tally) and self._strikes(host, word.progress.get(root, 0.0)):
                victim = host
                waiting.discard(host)
                self.processes.signal(host, signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)
                fault = None
        self._held = self._object.manifest.decoded_root
        for host in arrived:
            self._send(host, Hold((self._held,)))
        return arrived, victim

    def details(self) -> dict[str, Any]:
        """What the seed planned for the newest object, and what relays had to say."""
        self._rest(_SETTLE_S)  # the last tally comes within a second
        tally, newest = self._planned or self._seed_tally, self._seed_tally
        assert tally is not None, "entered"
        assert newest is not None, "entered"
        depths = [depth for _, depth in self._depths()]
        return {
            "predicted_share_s": round(tally.predicted_s, 3),
            "bound_seen_by_seed_s": round(tally.bound_s, 3),
            "uplink_seen_by_seed_mbps": round(8 * tally.uplink_bytes_per_s / 1e6, 1),
            "depth": max(depths, default=0),
            "chains": depths.count(1),
            "reparentings": sum(node.reparentings for node in newest.nodes),
            "nodes": [
                {
                    "id": node.node_id,
                    "parent": node.parent,
                    "up_mbps": round(8 * node.up_bytes_per_s / 1e6, 1),
                    "down_mbps": round(8 * node.down_bytes_per_s / 1e6, 1),
                }
                for node in tally.nodes
            ],
            "events": self._events[-20:],
        }

    def _open(self, host: int, authority: bytes, seed_port: int) -> None:
        key_pem, public_pem = new_peer_key()
        certificate = issue_peer_certificate(self._authority, public_pem, self._hosts[host], datetime.now(UTC))
        order = Open(
            node_id=self._hosts[host],
            run_id=_RUN_ID,
            manifest_key=public_key(self._key),
            authority_pem=authority,
            certificate_pem=certificate,
            key_pem=key_pem,
            host=self._network.address(host),
            port=0,
            folder=str(self.processes.folder(host) / "objects"),
            seed_host="" if host == SEED_HOST else self._network.address(SEED_HOST),
            seed_port=seed_port,
            topology=self._topology,
            gamma=_GAMMA,
        )
        self._send(host, order)

    def _listening(self, hosts: set[int]) -> int:
        """Wait until all of ``hosts`` listen; return the port of the last one."""
        until_s, port = time.monotonic() + _START_S, 0
        while hosts:
            speaker, word, _ = self._hear(until_s)
            if isinstance(word, Listening):
                hosts.discard(speaker)
                port = word.port
        return port

    def _strikes(self, host: int, progress: float) -> bool:
        return progress >= FAULT_AT and host == self._middle()

    def _middle(self) -> int:
        """The relay half-way down the longest chain of the standing plan; any, where the seed does not say who feeds
        whom."""
        depths = dict(self._depths())
        parents = self._parents()
        if not depths:
            return self._workers[len(self._workers) // 2]
        deepest = max(depths, key=lambda node: depths[node])
        path = [deepest]
        while len(path) < depths[deepest]:
            path.append(parents[path[-1]])
        middle = path[len(path) // 2]
        return next(host for host, node in self._hosts.items() if node == middle)

    def _depths(self) -> Iterator[tuple[str, int]]:
        parents = self._parents()
        for node in parents:
            depth, above = 1, parents[node]
            while above in parents and depth <= len(parents):
                depth, above = depth + 1, parents[above]
            yield node, depth

    def _parents(self) -> Mapping[str, str]:
        tally = self._planned or self._seed_tally
        nodes = tally.nodes if tally is not None else ()
        return {node.node_id: node.parent for node in nodes if node.parent}

    def _rest(self, pause_s: float) -> None:
        until_s = time.monotonic() + pause_s
        while (message := self.processes.read(until_s)) is not None:
            self._note(message.host, _DECODER.decode(message.body), message.read_s)

    def _send(self, host: int, order: Order) -> None:
        self.processes.send(host, msgspec.msgpack.encode(order))

    def _hear(self, until_s: float, waiting: set[int] | None = None) -> tuple[int, AnyWord, float]:
        message = self.processes.read(until_s)
        if message is None:
            about = f"hosts {sorted(waiting)} still lack something" if waiting else "a relay did not answer"
            raise Broken(f"{about}; newest events: {self._events[-10:]}")
        word = _DECODER.decode(message.body)
        self._note(message.host, word, message.read_s)
        return message.host, word, message.read_s

    def _note(self, host: int, word: AnyWord, read_s: float) -> None:
        if isinstance(word, Tally) and host == SEED_HOST:
            self._seed_tally = word
            if self._planned is None and read_s > self._planned_from_s:
                self._planned = word
        elif isinstance(word, Event):
            self._events.append({"host": host, "kind": word.kind, **word.fields})

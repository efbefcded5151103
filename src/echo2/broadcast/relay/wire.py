"""One connection of a relay: a thread that reads and writes one TLS socket.

Invariant (I9): no frame costs memory before its length was checked against its type and its sender; a chunk is
announced by its header, accepted or thrown away, verified, stored, and only then told to the core.

One thread does both directions of a connection, because a TLS session is not safe to use from two. The socket does not
block; a frame to send is chosen when the kernel has little left to send, so that what is chosen is still wanted.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import ssl
import threading
import time
from typing import Protocol

from echo2.broadcast.parse import MAX_CHUNK_BYTES
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.renewal import Renewal
from echo2.broadcast.relay.sockets import flow_of, pace, renew
from echo2.errors import Malformed

RECORD_BYTES = 16 * 1024
"""What TLS carries at once."""
READ_BYTES, WRITE_BYTES = 512 * 1024, 256 * 1024
"""Of one direction before the other has its turn; a frame under way is finished."""
POLL_MS = 500
MOST_AWAITED_BYTES = 256 * 1024
"""The kernel wakes us for so much of a chunk at once, not for every packet: waking up is most of the work."""
UNSEEN_BYTES = 20 * 1024
"""Of a chunk's rest TLS may have taken a record already that it has not given out, so these cannot be waited for."""
TAIL_MS, MOST_TAILS = 2, 50
"""They are given this time instead: less than a fast line needs for a chunk, and one wake-up instead of ten. After so
many times without a byte the other side has stopped, and is waited for as usual."""
STALLED_S = 10.0
"""Who takes not a byte of what is there for it for so long is hung up on."""
BODY_BYTES = 64 * 1024
"""Of a control frame for which memory is taken at first; more only as it comes."""


class Ends(Protocol):
    """What a wire asks of its relay; every call may come from any wire's thread."""

    def next_frame(self, number: int, buffer: bytearray) -> memoryview | bytes:
        """The frame to send now, in ``buffer`` (which may grow) or not; empty for none."""
        ...

    def heard(self, number: int) -> None: ...

    def accepts(self, number: int, stream: int, chunk: int, nbytes: int) -> str | None: ...

    def chunk(self, number: int, root: str, stream: int, chunk: int, data: memoryview) -> None: ...

    def control(self, number: int, frame: f.AnyControl) -> None:
        """Raises Malformed."""
        ...

    def control_limit(self, number: int) -> int:
        """Largest control frame that this peer may send."""
        ...

    def ended(self, number: int, why: str) -> None: ...


class Wire:
    def __init__(self, number: int, sock: ssl.SSLSocket, ends: Ends) -> None:
        """Raises OSError when there are too many open files."""
        self.number = number
        self.sock = sock
        self._ends = ends
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._waking = threading.Lock()
        self._why = ""
        self._buffer = bytearray(RECORD_BYTES)
        """Reused for every chunk that is sent: fresh memory costs more than the copy."""
        self._out = memoryview(b"")
        self._header = bytearray(f.HEADER.size)
        self._body = memoryview(self._header)
        """What is being filled: the header, or the body that it announced."""
        self._filled = 0
        self._frame: tuple[int, int, int] | None = None
        """Type, stream and number of the frame whose body comes; None while its header does."""
        self._root: str | None = None
        self._skip = 0
        """Bytes of the body still to be thrown away."""
        self._scratch = memoryview(bytearray(RECORD_BYTES))
        self._chunk = bytearray()
        self._length = 0
        """Of the body, of which ``_body`` may be the first part."""
        self._awaited = 1
        self._mask = -1
        self._tails = 0
        """Waits for the end of a body in a row that brought nothing."""
        self._read_s = self._sent_s = time.monotonic()
        """When it was last tried to read, and when something was last sent or there was nothing to send."""
        self._arrived_bytes = -1
        """At the other side, when nothing could be sent for half the time; -1 while something can."""
        self._woken = True
        """There may be something to send."""
        self._is_held = False
        self._renewal = Renewal()

    def look(self, now: float) -> tuple[int, int]:
        """Several times per second: bytes that arrived at the other side, and here."""
        flow = flow_of(self.sock)
        if self._renewal.is_due(self._is_held, flow.acked_bytes, flow.queues, now):
            renew(self.sock)
        return flow.acked_bytes, flow.received_bytes

    def wake(self) -> None:
        with self._waking, contextlib.suppress(BlockingIOError):
            if self._wake_out >= 0:
                os.write(self._wake_out, b"\0")

    def pace(self, bytes_per_s: float) -> None:
        """Send no faster; 0 for as fast as it goes."""
        self._is_held = bytes_per_s > 0
        with contextlib.suppress(OSError):  # it may be closed by now
            pace(self.sock, bytes_per_s)

    def hang_up(self, why: str) -> None:
        self._why = self._why or why
        self.wake()

    def run(self) -> None:
        """Until hung up, or the other side is gone. Consumes frames of both directions; never raises."""
        try:
            self.sock.setblocking(False)
            poller = select.poll()
            poller.register(self._wake_in, select.POLLIN)
            while not self._why:
                self._turn(poller)
        except (OSError, ssl.SSLError, Malformed) as error:
            self._why = self._why or f"{type(error).__name__}: {error}"
        finally:
            self.sock.close()
            with self._waking:  # the descriptor's number may name another file a moment later
                os.close(self._wake_in)
                os.close(self._wake_out)
                self._wake_out = -1
            self._ends.ended(self.number, self._why)

    def _turn(self, poller: select.poll) -> None:
        if self._woken and not self._out:
            self._choose()
        rest = self._rest_bytes()
        near = 0 < rest <= UNSEEN_BYTES and self._tails < MOST_TAILS
        self._expect(poller, (0 if near else select.POLLIN) | (select.POLLOUT if self._out else 0), rest)
        ready = dict(poller.poll(0 if self.sock.pending() else TAIL_MS if near else POLL_MS))
        if self._wake_in in ready:
            self._woken = True
            os.read(self._wake_in, 4096)
        events, now = ready.get(self.sock.fileno(), 0), time.monotonic()
        waited = now - self._read_s >= (TAIL_MS if near else POLL_MS) / 1000  # a slow line may not reach the low water
        if self.sock.pending() or events & ~select.POLLOUT or waited:
            self._read_s = now
            self._tails = 0 if self._read() else self._tails + near
        if (events & select.POLLOUT and self._write()) or not self._out:
            self._sent_s, self._arrived_bytes = now, -1
        elif now - self._sent_s > STALLED_S / 2:
            self._hang_up_if_stalled(now)

    def _hang_up_if_stalled(self, now: float) -> None:
        """On a slow line there may be room for more only after long."""
        before, self._arrived_bytes = self._arrived_bytes, flow_of(self.sock).acked_bytes
        if self._arrived_bytes == before:
            self._why = self._why or f"it took nothing for {STALLED_S:g} s"
        self._sent_s = now

    def _rest_bytes(self) -> int:
        """Of the body that comes."""
        return self._skip or (self._length - self._filled if self._frame else 0)

    def _expect(self, poller: select.poll, mask: int, rest_bytes: int) -> None:
        """Have the kernel wake us for what we can use, and for most of the body at once."""
        if mask != self._mask:
            self._mask = mask
            poller.register(self.sock, mask)
        awaited = max(min(rest_bytes - UNSEEN_BYTES, MOST_AWAITED_BYTES), 1)
        if awaited != self._awaited:
            self._awaited = awaited
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, awaited)

    def _choose(self) -> bool:
        """Take the next frame to send; False when there is none until the next wake."""
        self._out = memoryview(b"")  # lets go of the buffer, which cannot grow otherwise
        self._out = memoryview(self._ends.next_frame(self.number, self._buffer))
        self._woken = len(self._out) > 0
        return self._woken

    def _write(self) -> int:
        """Returns the bytes that the kernel took."""
        budget = WRITE_BYTES
        with contextlib.suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while budget > 0 and (self._out or self._choose()):
                sent = self.sock.send(self._out)  # all of it, or an error after which the same is tried again
                self._out = self._out[sent:]
                budget -= sent
        return WRITE_BYTES - budget

    def _read(self) -> int:
        """Returns the bytes that came."""
        total = 0
        try:
            while total < READ_BYTES:
                target = self._scratch[: self._skip] if self._skip else self._body[self._filled :]
                got = self.sock.recv_into(target)
                if got == 0:
                    self._why = self._why or "the other side closed the connection"
                    break
                total += got
                self._advance(got)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        finally:
            if total:
                self._ends.heard(self.number)
        return total

    def _advance(self, got: int) -> None:
        if self._skip:
            self._skip -= got
            if not self._skip:
                self._expect_header()
            return
        self._filled += got
        if self._filled < len(self._body):
            return
        if self._frame is not None and self._filled < self._length:
            more = bytearray(min(4 * len(self._body), self._length))
            more[: self._filled] = self._body
            self._body = memoryview(more)
        elif self._frame is None:
            self._begin_body()
        else:
            self._end_body()

    def _expect_header(self) -> None:
        self._frame, self._root = None, None
        self._body, self._filled = memoryview(self._header), 0

    def _begin_body(self) -> None:
        kind, _, _, length, stream, number = f.HEADER.unpack(self._header)
        limit = {
            f.CONTROL: self._ends.control_limit(self.number),
            f.CHUNK: MAX_CHUNK_BYTES,
            f.PADDING: f.MAX_PADDING_BYTES,
        }.get(kind, -1)
        if length > limit:
            raise Malformed(f"a frame of type {kind} may announce {max(limit, 0)} bytes, got {length}")
        if kind == f.CHUNK:
            self._root = self._ends.accepts(self.number, stream, number, length)
        if length and (kind == f.PADDING or (kind == f.CHUNK and self._root is None)):
            self._skip = length
            return
        if not length:
            self._expect_header()
            return
        self._frame, self._filled, self._length = (kind, stream, number), 0, length
        if kind == f.CHUNK and len(self._chunk) < length:  # of a size that the signed manifest names
            self._chunk = bytearray(length)
        self._body = memoryview(self._chunk if kind == f.CHUNK else bytearray(min(length, BODY_BYTES)))[:length]

    def _end_body(self) -> None:
        assert self._frame is not None, "a body has a header"
        kind, stream, number = self._frame
        body, root = self._body, self._root
        self._expect_header()
        if kind == f.CHUNK:
            assert root is not None, "a chunk is kept for an object"
            self._ends.chunk(self.number, root, stream, number, body)
        else:
            self._ends.control(self.number, f.decode_control(body))

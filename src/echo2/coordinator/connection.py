"""One HTTP connection of the coordinator, with deadlines in both directions.

Invariant (H01, I7): headers that are not complete in time, and answers that the client does not take, end the
connection; sockets that drip cost a descriptor and a timer for a while and nothing else. What a client took is what
its machine acknowledged, so neither full buffers here nor large ones in between look like a standstill.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.broadcast.relay.sockets import flow_of
from echo2.coordinator.limits import Limits
from echo2.transport.progress import Progress

LOOKS_PER_STALL = 4
"""How often, in the time a client may stall, it is looked whether it does."""
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing drops what the kernel still holds for the other side."""


class Uptake:
    """Whether a client takes what is written to it. Pure."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._progress: Progress | None = None
        """None while nothing waits to be taken."""
        self._waiting_bytes = self._acked_bytes = 0

    def is_stuck(self, waiting_bytes: int, acked_bytes: int, now_s: float) -> bool:
        """waiting_bytes: written and not yet given to the kernel.  acked_bytes: acknowledged since the connection
        began; 0 where the kernel does not say, and then what waits must become less."""
        moved = max(acked_bytes - self._acked_bytes, self._waiting_bytes - waiting_bytes, 0)
        self._waiting_bytes, self._acked_bytes = waiting_bytes, acked_bytes
        if not waiting_bytes:
            self._progress = None
        elif self._progress is None:
            self._progress = self._limits.progress(now_s)
        else:
            return self._progress.moved(moved, now_s) <= now_s
        return False


def protocol(limits: Limits) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with deadlines; uvicorn's own timers stop at the first byte."""

    class Bounded(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None
        """Of the headers."""
        _look: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()
            self._uptake = Uptake(limits)
            self._look_later()

        def data_received(self, data: bytes) -> None:
            self._arm()
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._disarm()

        def connection_lost(self, error: Exception | None) -> None:
            self._disarm()
            if self._look is not None:
                self._look.cancel()
            super().connection_lost(error)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self.transport.close()  # a body that nobody asked for may go on for ever

        def _arm(self) -> None:
            if self._deadline is None and self.conn.their_state is h11.IDLE:
                self._deadline = self.loop.call_later(limits.header_s, self.transport.abort)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

        def _look_later(self) -> None:
            self._look = self.loop.call_later(limits.stall_s / LOOKS_PER_STALL, self._look_now)

        def _look_now(self) -> None:
            sock = self.transport.get_extra_info("socket")
            waiting = self.transport.get_write_buffer_size()
            if not self._uptake.is_stuck(waiting, flow_of(sock).acked_bytes, self.loop.time()):
                self._look_later()
                return
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()

    return Bounded

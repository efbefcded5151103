"""Serving objects to many workers over one uplink.

Invariant (H09): at most ``limits.downloads`` objects are on the wire at once, in the order they were asked for,
whatever the number of workers; the file is read in threads, so leases and heartbeats are answered meanwhile. A file
that is pruned while it is sent is sent to its end: the open descriptor keeps it.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from echo2.coordinator.limits import Limits
from echo2.errors import Malformed, Refused
from echo2.transport.codec import Busy

BLOCK_BYTES = 1024 * 1024
_RANGE = re.compile(r"bytes=(0|[1-9][0-9]{0,15})-(0|[1-9][0-9]{0,15})?")


class ByteRange(NamedTuple):
    """Bytes [first, end) of a file of ``size``."""

    first: int
    end: int
    size: int
    asked: bool
    """Whether the request had a Range header at all."""


class Slots:
    """Places for downloads, first come, first served."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._free = asyncio.Semaphore(limits.downloads)
        self._of_peer: Counter[str] = Counter()

    @asynccontextmanager
    async def one(self, peer_id: str) -> AsyncIterator[None]:
        """Raises Busy when none comes free in time, or when the peer has its share already."""
        if self._of_peer[peer_id] >= self._limits.downloads_per_peer:
            raise Busy(f"at most {self._limits.downloads_per_peer} downloads of one program run at once; ask again")
        self._of_peer[peer_id] += 1
        try:
            try:
                async with asyncio.timeout(self._limits.download_wait_s):
                    await self._free.acquire()
            except TimeoutError:
                raise Busy(f"{self._limits.downloads} downloads are under way, which is the most; ask again") from None
            try:
                yield
            finally:
                self._free.release()
        finally:
            self._of_peer[peer_id] -= 1
            if not self._of_peer[peer_id]:
                del self._of_peer[peer_id]


class FileResponse(Response):
    """A file, or one range of it. A reader that takes none of it loses its connection (``connection.py``)."""

    def __init__(self, descriptor: int, span: ByteRange, held: AsyncExitStack) -> None:
        """``held`` is let go when the file is sent or the reader gone."""
        headers = {"content-length": str(span.end - span.first), "accept-ranges": "bytes"}
        if span.asked:
            headers["content-range"] = f"bytes {span.first}-{span.end - 1}/{span.size}"
        super().__init__(None, 206 if span.asked else 200, headers, "application/octet-stream")
        self._descriptor = descriptor
        self._next, self._end = span.first, span.end
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._held:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_blocks(HttpRequest(scope, receive), send)

    async def _send_blocks(self, request: HttpRequest, send: Send) -> None:
        """Leaves the body unfinished, which closes the connection, when reader or file fall short."""
        if self._next == self._end:
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        while self._next < self._end:
            length = min(BLOCK_BYTES, self._end - self._next)
            block = await asyncio.to_thread(os.pread, self._descriptor, length, self._next)
            if len(block) != length or await request.is_disconnected():
                return
            self._next += length
            await send({"type": "http.response.body", "body": block, "more_body": self._next < self._end})


def parse_range(header: str | None, size: int) -> ByteRange:
    """A Range header of one range; the whole file without one. Raises Malformed."""
    if header is None:
        return ByteRange(0, size, size, asked=False)
    matched = _RANGE.fullmatch(header.strip())
    first = int(matched[1]) if matched else -1
    end = min(int(matched[2]) + 1, size) if matched and matched[2] else size
    if not 0 <= first < end:
        raise Malformed(f"Range must be one range bytes=FIRST-LAST within {size} bytes, got {header[:64]!r}")
    return ByteRange(first, end, size, asked=True)


def open_object(path: Path | None) -> tuple[int, int]:
    """Descriptor and size. Raises Refused when the object is gone: pruned, or never published."""
    try:
        if path is None:
            raise FileNotFoundError
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        raise Refused("this object is not on the shelf; ask for the current path") from None
    return descriptor, os.fstat(descriptor).st_size

"""One HTTP exchange with the coordinator, bounded in time and in bytes.

Invariant (I7, I9): an exchange ends whatever the other side does. What is sent or received must keep going at the
slowest rate that is still called progress, so stalls and drips end and honest slow links do not (H01).
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Self

import aiohttp
import msgspec

from echo2.errors import Refused, TransportError
from echo2.transport.codec import error_of
from echo2.transport.join import JoinString
from echo2.transport.progress import SLOWEST_BYTES_PER_S, Progress
from echo2.transport.tls import pinned_context

_LARGEST_SHORT_BYTES = 64 * 1024
"""Of an error or a certificate; more is not read."""
_EXPECT_ABOVE_BYTES = 64 * 1024
"""Larger bodies wait for the coordinator's go-ahead: a refusal then arrives, instead of a broken pipe that looks like a
lost link and is retried for ever."""
_UNDER_WAY_BYTES = 1024 * 1024
"""The kernel may take so much of a body at once, and nothing for as long as the line needs for it."""


class Deadlines(msgspec.Struct, frozen=True):
    connect_s: float = 10.0
    """For a TCP connection and its TLS handshake."""
    answer_s: float = 30.0
    """For an answer to begin, beyond any wait that was asked for; covers queueing for a download slot. So far may a
    transfer fall behind the slowest rate, too."""
    min_rate_bytes_per_s: float = SLOWEST_BYTES_PER_S
    """Slowest transfer that still counts as progress."""

    def transfer_s(self, nbytes: int) -> float:
        """Longest time ``nbytes`` may take, however steadily they come."""
        return self.answer_s + nbytes / self.min_rate_bytes_per_s

    def progress(self, now_s: float, extra_s: float = 0.0) -> Progress:
        return Progress(self.answer_s + extra_s, self.min_rate_bytes_per_s, now_s)


class Wire:
    """A client's connections to one coordinator. Close it in the loop that used it."""

    def __init__(self, join: JoinString, deadlines: Deadlines) -> None:
        self._join = join
        self.deadlines = deadlines
        self._credential = ""
        self._session: aiohttp.ClientSession | None = None
        self._opening = asyncio.Lock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def present(self, credential: str) -> None:
        """Send this credential with every exchange from now on."""
        self._credential = credential

    async def exchange(self, method: str, path: str, body: bytes = b"", *, cap: int, wait_s: float = 0.0) -> bytes:
        """The whole answer, at most ``cap`` bytes.

        Raises TransportError when it does not come in time, else the error that the coordinator answered with.
        """
        async with self.answer(method, path, body, wait_s=wait_s) as response:
            data = await self.read(response, cap + 1)
            if len(data) > cap:
                response.close()
                raise Refused(f"the coordinator's answer to {path} must have at most {cap} bytes")
            return data

    async def read(self, response: aiohttp.ClientResponse, most: int) -> bytes:
        """The next ``most`` bytes of the answer, or what is left of it. Raises TimeoutError when they stop coming."""
        loop, data = asyncio.get_running_loop(), bytearray()
        progress = self.deadlines.progress(loop.time())
        async with asyncio.timeout_at(progress.due_s) as scope:
            while len(data) < most and (block := await response.content.read(most - len(data))):
                data += block
                scope.reschedule(progress.moved(len(block), loop.time()))
        return bytes(data)

    @asynccontextmanager
    async def answer(
        self, method: str, path: str, body: bytes = b"", *, wait_s: float = 0.0, headers: dict[str, str] | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer of status 2xx whose body is still to be read, with ``read``."""
        try:
            session, loop, sent = await self._open(), asyncio.get_running_loop(), _Body(body)
            in_kernel_s = min(len(body), _UNDER_WAY_BYTES) / self.deadlines.min_rate_bytes_per_s
            progress = self.deadlines.progress(loop.time(), wait_s + in_kernel_s)
            async with asyncio.timeout_at(progress.due_s) as scope:
                sent.taken = lambda nbytes: _extend(scope, progress.moved(nbytes, loop.time()))
                try:
                    response = await session.request(
                        method,
                        self._join.url + path,
                        data=sent if body else None,
                        headers={"Authorization": f"Bearer {self._credential}", **(headers or {})},
                        expect100=len(body) > _EXPECT_ABOVE_BYTES,
                        allow_redirects=False,
                    )
                finally:
                    sent.taken = _nothing  # an answer may come before the body is read to its end
            try:
                if response.status >= 300:
                    async with asyncio.timeout(self.deadlines.answer_s):
                        raise error_of(response.status, await _beginning(response))
                yield response
            except BaseException:
                response.close()  # what is left of the body belongs to nobody
                raise
            finally:
                response.release()
        except (aiohttp.ClientError, asyncio.IncompleteReadError, TimeoutError, ConnectionError, ssl.SSLError) as error:
            raise TransportError(f"{self._join.url} gave no whole answer to {path}: {_reason(error)}") from None

    async def _open(self) -> aiohttp.ClientSession:
        async with self._opening:
            if self._session is None:
                self._session = self._new_session(await self._context())
            return self._session

    async def _context(self) -> ssl.SSLContext | bool:
        """How this join string wants the coordinator verified."""
        if not self._join.tls or self._join.ca_fingerprint is None:
            return True  # plain HTTP, or the system's authorities
        async with self._new_session(False) as session, asyncio.timeout(self.deadlines.answer_s):
            # Unverified, and used for nothing but the certificate whose fingerprint is checked next.
            response = await session.get(self._join.url + "/ca.pem", allow_redirects=False)
            pem = await _beginning(response)
            response.close()
        return pinned_context(pem, self._join.ca_fingerprint)

    def _new_session(self, context: ssl.SSLContext | bool) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.deadlines.connect_s),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
        )


class _Body(io.BytesIO):
    """A request's body that tells how much of it was taken. Reading on means that what came before was let go."""

    taken: Callable[[int], None]

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.taken(len(data))
        return data


def _nothing(nbytes: int) -> None:
    pass


def _extend(scope: asyncio.Timeout, due_s: float) -> None:
    if not scope.expired():
        scope.reschedule(due_s)


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """The answer's first bytes: all of a short one."""
    data = bytearray()
    async for block in response.content.iter_any():
        data += block
        if len(data) > _LARGEST_SHORT_BYTES:
            break
    return bytes(data[:_LARGEST_SHORT_BYTES])


def _reason(error: BaseException) -> str:
    if isinstance(error, TimeoutError):
        return "the deadline passed"
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its certificate is refused ({error.certificate_error})"
    return str(error) or type(error).__name__

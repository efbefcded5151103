"""Sockets for the coordinator's HTTP surface.

Invariant (H01, I7): a connection that does not complete a request's headers in time is closed, so sockets that drip
cost a descriptor and a timer for a while and nothing else. A certificate replaced on disk serves new connections
without a restart (H10).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from echo2.errors import UserError
from echo2.transport.tls import ServerCertificate, utc_now

log = logging.getLogger("echo2.coordinator")

KEEP_ALIVE_S = 75.0
"""Longer than clients keep idle connections, so that they are the ones to close."""
DRAIN_S = 2
"""Answers under way get so long when the server ends; then they are cut."""
RELOAD_S = 5.0
"""How often certificate files are looked at."""
MOST_CONNECTIONS = 4096


async def serve(
    app: ASGIApp,
    host: str,
    port: int,
    tls: ServerCertificate | None = None,
    *,
    header_s: float = 20.0,
    on_bound: Callable[[int], None] = lambda port: None,
) -> None:
    """Serve ``app`` until cancelled, then close the sockets within a few seconds.

    on_bound: told the port once connections are accepted; with ``port`` 0, the one that was free.
    Raises UserError when host and port cannot be listened on.
    """
    listener = listen(host, port)
    try:
        config = uvicorn.Config(
            app,
            http=_protocol(header_s),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=DRAIN_S,
            limit_concurrency=MOST_CONNECTIONS,
            ssl_context_factory=None if tls is None else lambda *_: tls.context,
        )
        # What clients do wrong is answered, not logged; what this package does wrong is logged where it happens.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config.load()
        server = uvicorn.Server(config)
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[listener])
        try:
            on_bound(listener.getsockname()[1])
            await _tend(server, tls)
        finally:
            await server.shutdown(sockets=[listener])
    finally:
        listener.close()


def listen(host: str, port: int, key: str = "coordinator.port") -> socket.socket:
    """A listening socket. Raises UserError naming the address, the port's key and what stands against it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(1024)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise UserError(
            f"coordinator.host and {key} must be free to listen on, {host}:{port} is not "
            f"({error.strerror}); choose another port, or 0 for any"
        ) from None
    return listener


async def _tend(server: uvicorn.Server, tls: ServerCertificate | None) -> None:
    """Keep the server's clock and certificate fresh. Ends by cancellation only."""
    ticks = 0
    while True:
        await server.on_tick(ticks)
        ticks += 1
        if tls is not None and ticks % (RELOAD_S * 10) == 0 and (news := tls.reload(utc_now())):
            log.warning("TLS: %s", news)
        await asyncio.sleep(0.1)


def _protocol(header_s: float) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol with a total deadline on headers; uvicorn's own timers stop at the first byte."""

    class PromptHeaders(H11Protocol):
        _deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._arm()

        def data_received(self, data: bytes) -> None:
            self._arm()
            super().data_received(data)
            if self.conn.their_state is not h11.IDLE:
                self._disarm()

        def connection_lost(self, error: Exception | None) -> None:
            self._disarm()
            super().connection_lost(error)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:
                self.transport.close()  # a body that nobody asked for may go on for ever

        def _arm(self) -> None:
            if self._deadline is None and self.conn.their_state is h11.IDLE:
                self._deadline = self.loop.call_later(header_s, self.transport.abort)

        def _disarm(self) -> None:
            if self._deadline is not None:
                self._deadline.cancel()
                self._deadline = None

    return PromptHeaders

"""Sockets for the coordinator's HTTP surface.

Invariant (H01, I7): every connection has the deadlines of ``connection.py``. A certificate replaced on disk serves new
connections without a restart (H10).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import uvicorn
from starlette.types import ASGIApp

from echo2.coordinator.connection import protocol
from echo2.coordinator.limits import Limits
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
    limits: Limits = Limits(),  # noqa: B008 - immutable
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
            http=protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=int(KEEP_ALIVE_S),
            timeout_graceful_shutdown=DRAIN_S,
            limit_concurrency=MOST_CONNECTIONS,
        )
        # What clients do wrong is answered, not logged; what this package does wrong is logged where it happens.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        config.load()
        # After the load, which makes a context from files: only newer versions of uvicorn take one ready made.
        config.ssl = None if tls is None else tls.context
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

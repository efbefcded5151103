"""The coordinator's HTTP surface: bytes to typed messages and back.

Invariant (I9): before a request's body is read, its sender is authenticated, its role may say it, its rate and its
declared size are within the limits; the body keeps coming or is given up (H01), and is decoded against its type. What a
client does wrong costs it an answer of one sentence and costs nobody else anything.

    POST /v1/<message>                        msgpack in, msgpack out; Enrol by join token, the rest by credential
    GET  /v1/objects/<root>                   one range of a published object
    PUT  /v1/objects/<root>?offset=           whole chunks of an offered object (learner)
    GET  /v1/assets/<name>   PUT …?blake3=    a model's small files (PUT: learner)
    GET  /metrics                             Prometheus text
    GET  /healthz   GET /ca.pem               open: alive; the run's CA certificate, to be checked against a fingerprint
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from echo2.coordinator.downloads import FileResponse, Slots, open_object, parse_range
from echo2.coordinator.limits import Limits, TokenBuckets
from echo2.coordinator.server import listen, serve
from echo2.errors import Echo2Error, Malformed, Refused, Starved, TransportError, Unauthorised
from echo2.ports import Clock
from echo2.transport.assets import MAX_ASSET_BYTES
from echo2.transport.codec import (
    ErrorBody,
    Received,
    decode_request,
    encode,
    request_kind,
    status_of,
    waiting_time,
)
from echo2.transport.messages import ROLES_OF, AssetFile, Enrol, Enrolled, Principal, Reply, Request, Role
from echo2.transport.partial import is_root

log = logging.getLogger("echo2.coordinator")

MAX_PIECE_BYTES = 64 * 1024 * 1024
"""Largest piece of an upload; at least the largest chunk."""
_READERS = frozenset({Role.WORKER, Role.LEARNER, Role.OPERATOR})
_WRITERS = frozenset({Role.LEARNER})
_MSGPACK = "application/msgpack"


class ServedShelf(Protocol):
    """The part of the shelf that moves bytes."""

    def object_path(self, root: str) -> Path | None: ...

    def asset_path(self, name: str) -> Path | None: ...

    async def write(self, root: str, offset: int, data: bytes) -> int: ...

    async def write_asset(self, asset: AssetFile, data: bytes) -> None: ...


class Service(Protocol):
    """What the coordinator offers to its HTTP surface."""

    @property
    def shelf(self) -> ServedShelf: ...

    async def enrol(self, request: Enrol) -> Enrolled: ...

    def authenticate(self, credential: str) -> Principal:
        """Raises Unauthorised."""
        ...

    async def handle(self, principal: Principal, request: Request) -> Reply:
        """Raises Refused, Fenced or another Echo2Error. A long poll is cancelled when its client is gone."""
        ...

    def prometheus(self) -> bytes: ...


class _Answered(Exception):
    """A refusal with a status of its own, raised where it is noticed."""

    def __init__(self, status: int, error: str, message: str, **headers: str) -> None:
        self.response = Response(
            encode(ErrorBody(error, message)), status, {"connection": "close", **headers}, media_type=_MSGPACK
        )


def build_app(service: Service, clock: Clock, limits: Limits = Limits(), ca_pem: bytes = b"") -> Starlette:  # noqa: B008
    """The ASGI application; ``ca_pem`` is served openly when TLS is on."""
    surface = _Surface(service, clock, limits)

    async def healthz(_: HttpRequest) -> Response:
        return PlainTextResponse("ok\n")

    async def ca(_: HttpRequest) -> Response:
        return Response(ca_pem, 200 if ca_pem else 404, media_type="application/x-pem-file")

    routes: list[tuple[str, str, _Endpoint]] = [
        ("GET", "/v1/objects/{root}", surface.get_object),
        ("PUT", "/v1/objects/{root}", surface.put_object),
        ("GET", "/v1/assets/{name}", surface.get_asset),
        ("PUT", "/v1/assets/{name}", surface.put_asset),
        ("POST", "/v1/{tag}", surface.message),
        ("GET", "/metrics", surface.metrics),
        ("GET", "/healthz", healthz),
        ("GET", "/ca.pem", ca),
    ]
    return Starlette(routes=[Route(path, _answering(endpoint), methods=[verb]) for verb, path, endpoint in routes])


_Endpoint = Callable[[HttpRequest], Awaitable[Response]]


class _Surface:
    def __init__(self, service: Service, clock: Clock, limits: Limits) -> None:
        self._service = service
        self._clock = clock
        self._limits = limits
        self._peers = TokenBuckets(limits.requests_per_s, limits.request_burst)
        self._strangers = TokenBuckets(limits.strangers_per_s, limits.stranger_burst)
        self._slots = Slots(limits)

    async def message(self, http: HttpRequest) -> Response:
        tag = http.path_params["tag"]
        kind = request_kind(tag)
        if kind is Enrol:
            self._admit(self._strangers, _address(http))
            enrol = decode_request(tag, await self._body(http, self._limits.body_cap(kind)))
            assert isinstance(enrol, Enrol)
            return _reply(await self._within(self._service.enrol(enrol), 0.0, tag))
        principal = self._principal(http, ROLES_OF[kind], tag)
        request = decode_request(tag, await self._body(http, self._limits.body_cap(kind)))
        wait_s = waiting_time(request)
        work = self._within(self._service.handle(principal, request), wait_s, tag)
        return _reply(await (_while_connected(http, work) if wait_s else work))

    async def get_object(self, http: HttpRequest) -> Response:
        principal = self._principal(http, _READERS, "downloading an object")
        return await self._file(http, principal, lambda: self._service.shelf.object_path(_root(http)))

    async def put_object(self, http: HttpRequest) -> Response:
        self._principal(http, _WRITERS, "uploading an object")
        root = _root(http)
        offset = http.query_params.get("offset", "")
        if not (offset.isascii() and offset.isdigit() and len(offset) <= 16):
            raise Malformed(f"offset must be a number of bytes, got {offset[:32]!r}")
        data = await self._body(http, MAX_PIECE_BYTES)
        return _reply(Received(await self._service.shelf.write(root, int(offset), data)))

    async def get_asset(self, http: HttpRequest) -> Response:
        principal = self._principal(http, _READERS, "downloading an asset")
        return await self._file(http, principal, lambda: self._service.shelf.asset_path(http.path_params["name"]))

    async def put_asset(self, http: HttpRequest) -> Response:
        self._principal(http, _WRITERS, "uploading an asset")
        data = await self._body(http, MAX_ASSET_BYTES)
        asset = AssetFile(http.path_params["name"], len(data), http.query_params.get("blake3", ""))
        await self._service.shelf.write_asset(asset, data)
        return _reply(Received(len(data)))

    async def _file(self, http: HttpRequest, principal: Principal, path: Callable[[], Path | None]) -> Response:
        """A response that holds a slot and the open file until it is sent; the path is looked up with the slot held."""
        async with AsyncExitStack() as held:
            await held.enter_async_context(self._slots.one(principal.peer_id))
            descriptor, size = open_object(path())
            held.callback(os.close, descriptor)
            span = parse_range(http.headers.get("range"), size)
            return FileResponse(descriptor, span, held.pop_all())

    async def metrics(self, http: HttpRequest) -> Response:
        self._principal(http, frozenset(Role), "reading metrics")
        return Response(self._service.prometheus(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def _principal(self, http: HttpRequest, roles: frozenset[Role], what: str) -> Principal:
        scheme, _, credential = http.headers.get("authorization", "").partition(" ")
        try:
            if scheme.lower() != "bearer" or not credential:
                raise Unauthorised("a credential is needed: Authorization: Bearer …; enrol with a join string first")
            principal = self._service.authenticate(credential)
        except Unauthorised:
            self._admit(self._strangers, _address(http))
            raise
        self._admit(self._peers, principal.peer_id)
        if principal.role not in roles:
            raise Refused(f"{what} is for {' and '.join(sorted(roles))}, this credential is {principal.role}'s")
        return principal

    def _admit(self, buckets: TokenBuckets, caller: str) -> None:
        if (wait_s := buckets.wait_s(caller, self._clock.monotonic())) > 0:
            message = f"too many requests; the next one is taken in {wait_s:.1f} s"
            raise _Answered(429, TransportError.__name__, message, **{"retry-after": str(int(wait_s) + 1)})

    async def _body(self, http: HttpRequest, cap: int) -> bytes:
        declared = http.headers.get("content-length", "")
        if not (declared.isascii() and declared.isdigit()):
            raise _Answered(411, Malformed.__name__, "a request must declare its Content-Length")
        if len(declared) > 16 or int(declared) > cap:
            message = f"the body must have at most {cap} bytes, {declared[:20]} were announced"
            raise _Answered(413, Malformed.__name__, message)
        loop, body = asyncio.get_running_loop(), bytearray()
        progress = self._limits.progress(loop.time())
        try:
            async with asyncio.timeout_at(progress.due_s) as scope:
                async for block in http.stream():
                    body += block
                    scope.reschedule(progress.moved(len(block), loop.time()))
        except TimeoutError:
            message = (
                f"a body must come at {self._limits.min_rate_bytes_per_s:.0f} bytes/s or faster, with pauses below "
                f"{self._limits.stall_s:g} s; {len(body)} of {declared} bytes came: send it again"
            )
            raise _Answered(408, TransportError.__name__, message) from None
        return bytes(body)

    async def _within(self, work: Coroutine[Any, Any, Reply], wait_s: float, what: str) -> Reply:
        limit_s = wait_s + self._limits.handle_s
        try:
            async with asyncio.timeout(limit_s) as scope:
                return await work
        except TimeoutError:
            if not scope.expired():
                raise
            log.error("%s was not handled within %.0f s", what, limit_s)
            raise Starved(f"{what} was not handled within {limit_s:.0f} s; try again") from None


def _answering(endpoint: _Endpoint) -> _Endpoint:
    """One sentence and a status for everything that can go wrong; a traceback in our log for what should not."""

    async def answer(http: HttpRequest) -> Response:
        try:
            return await endpoint(http)
        except _Answered as told:
            return told.response
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it
        except Echo2Error as error:
            status, body = status_of(error)
            return _Answered(status, body.error, body.message).response
        except Exception:
            log.exception("%s %s failed", http.method, http.url.path)
            return _Answered(500, "", "the coordinator failed to handle this; its log says why").response

    return answer


async def _while_connected(http: HttpRequest, work: Coroutine[Any, Any, Reply]) -> Reply:
    """Result of ``work``, cancelled when the client goes: a lease must not be granted to a closed socket."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_until_gone(http))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(http: HttpRequest) -> None:
    """Returns when the client closed its connection. Only after the body was read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _reply(message: Reply | Received) -> Response:
    return Response(encode(message), media_type=_MSGPACK)


def _root(http: HttpRequest) -> str:
    root = str(http.path_params["root"])
    if not is_root(root):
        message = f"an object is named by 64 lower-case hexadecimal digits, got {root[:80]!r}"
        raise _Answered(404, Malformed.__name__, message)
    return root


def _address(http: HttpRequest) -> str:
    return http.client.host if http.client else ""


__all__ = ["Limits", "ServedShelf", "Service", "build_app", "listen", "serve"]

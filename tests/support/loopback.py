"""A small coordinator service behind the real HTTP surface on loopback sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from echo2.broadcast.disk_shelf import DiskShelf
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.broadcast.signing import generate_key, public_key
from echo2.coordinator.http import Limits, serve
from echo2.errors import Refused, Unauthorised
from echo2.transport.client import HttpTransport
from echo2.transport.join import JoinString
from echo2.transport.messages import (
    AwaitPolicy,
    Done,
    Enrol,
    Enrolled,
    GetStatus,
    Heartbeat,
    HeartbeatReply,
    Leave,
    PolicyNews,
    Principal,
    Reply,
    Request,
    Role,
    SubmitGroup,
    SubmitVerdicts,
)
from echo2.transport.partial import OBJECT_NAME
from echo2.transport.tls import ServerCertificate
from echo2.types import Verdict


class Shelf(DiskShelf):
    """…that also serves files which were never uploaded to it, so that a test knows their every byte."""

    laid_out: dict[str, Path]

    def object_path(self, root: str) -> Path | None:
        return self.laid_out.get(root) or super().object_path(root)


CREDENTIALS = {f"secret-{role.value}": Principal(role, f"{role.value}-1") for role in Role}


class FakeService:
    """Answers a few messages; ``held`` long polls wait until ``news`` is set."""

    def __init__(self, folder: Path) -> None:
        self.key = generate_key()
        self.shelf = Shelf(folder / "snapshots", self.key)
        self.shelf.laid_out = {}
        self.news = asyncio.Event()
        self.polling = asyncio.Event()
        self.abandoned = asyncio.Event()
        self.enrolments = 0

    async def enrol(self, request: Enrol) -> Enrolled:
        if not request.token.startswith("token-"):
            raise Unauthorised("the join token is wrong or used up; ask for a new join string")
        self.enrolments += 1
        role = Role(request.token.removeprefix("token-"))
        return Enrolled(f"{role.value}-1", f"secret-{role.value}", role, "run", public_key(self.key))

    def authenticate(self, credential: str) -> Principal:
        if credential not in CREDENTIALS:
            raise Unauthorised("this credential is not known; enrol again")
        return CREDENTIALS[credential]

    async def handle(self, principal: Principal, request: Request) -> Reply:
        match request:
            case Heartbeat():
                return HeartbeatReply(drain=False)
            case AwaitPolicy():
                return await self._poll()
            case SubmitGroup(rows=rows):
                return SubmitVerdicts(tuple(Verdict.ACCEPTED for _ in rows))
            case Leave():
                raise Refused("you hold leases; finish them first")
            case GetStatus():
                raise ZeroDivisionError("a bug with a secret in it")
        return Done()

    def prometheus(self) -> bytes:
        return b"echo2_step 3\n"

    def lay_out(self, manifest: Manifest, folder: Path) -> None:
        """Serve the raw object in ``folder``."""
        self.shelf.laid_out[manifest.object_root] = folder / OBJECT_NAME

    def prune(self, manifest: Manifest) -> None:
        self.shelf.laid_out.pop(manifest.object_root).unlink()

    async def _poll(self) -> PolicyNews:
        self.polling.set()
        try:
            await self.news.wait()
        except asyncio.CancelledError:
            self.abandoned.set()
            raise
        return PolicyNews(None)


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def wall(self) -> float:
        return self.now_s


async def fetch(line: HttpTransport, manifest: Manifest, into: Path) -> Path:
    """What ``line`` brings, as a file under the object's root; an earlier try's is continued."""
    into.mkdir(parents=True, exist_ok=True)
    file = await asyncio.to_thread(ChunkFile, into / manifest.object_root, manifest)
    try:
        await line.fetch_object(manifest, file)
    finally:
        file.close()
    return into / manifest.object_root


@asynccontextmanager
async def serving(
    app: ASGIApp,
    tls: ServerCertificate | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> AsyncIterator[int]:
    """The app on a free loopback port, which is the value."""
    bound: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    running = asyncio.ensure_future(serve(app, "127.0.0.1", 0, tls, limits=limits, on_bound=bound.set_result))
    try:
        await asyncio.wait((running, bound), return_when=asyncio.FIRST_COMPLETED)
        yield bound.result()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def impostor(
    answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[int]:
    """A server on a free loopback port that answers every connection with ``answer``, to the end of the context."""
    answering: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            await answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering)


def join_to(port: int, role: Role = Role.WORKER, tls: ServerCertificate | None = None) -> JoinString:
    return JoinString("127.0.0.1", port, tls is not None, f"token-{role.value}", tls.fingerprint if tls else None)


class Faulty:
    """An app whose object downloads go wrong: ``fault`` sees each outgoing body block and may change or end it.

    The fault returns the block to send, or None to break the connection there.
    """

    def __init__(self, app: ASGIApp, fault: Callable[[bytes], bytes | None]) -> None:
        self._app = app
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/v1/objects/") or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return

        async def send_faulty(message: Message) -> None:
            if message["type"] == "http.response.body":
                block = self._fault(message["body"])
                if block is None:
                    raise ConnectionAbortedError
                message = {**message, "body": block}
            await send(message)

        await self._app(scope, receive, send_faulty)

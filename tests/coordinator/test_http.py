from __future__ import annotations

import asyncio
import itertools
import logging
import select
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import aiohttp
import msgspec
import pytest
from loopback import FakeClock, FakeService, Faulty, fetch, join_to, serving
from snapshots import WriteSnapshot
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from echo2.coordinator.downloads import parse_range
from echo2.coordinator.http import Limits, build_app, listen
from echo2.coordinator.limits import TokenBuckets
from echo2.errors import Malformed, UserError
from echo2.simulation.loop import run_virtual
from echo2.transport.client import HttpTransport
from echo2.transport.codec import ErrorBody, encode
from echo2.transport.messages import (
    AwaitPolicy,
    CertifyRelay,
    Enrol,
    GetStatus,
    Heartbeat,
    Leave,
    RowSubmission,
    StopRun,
    SubmitGroup,
)
from echo2.transport.partial import object_is_whole
from echo2.transport.tls import ensure_certificates, pinned_context, utc_now
from echo2.types import Policy, RowStatus

LIMITS = Limits(header_s=0.3, stall_s=0.3, downloads=2, download_wait_s=5)
BEAT = encode(Heartbeat(None, ()))
TOO_MUCH_HELD = encode(AwaitPolicy(None, 1.0, tuple(Policy(0, version) for version in range(65))))
NO_ROOT = encode(AwaitPolicy(None, 1.0, (), {"../etc": 1}))


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path / "run")


@pytest.fixture
async def port(service: FakeService) -> AsyncIterator[int]:
    async with serving(build_app(service, FakeClock(), LIMITS), limits=LIMITS) as number:
        yield number


async def ask(
    port: int, path: str, body: bytes = b"", credential: str = "secret-worker", method: str = "POST"
) -> tuple[int, ErrorBody | None]:
    """Status, and the error of anything but 2xx."""
    headers = {"Authorization": f"Bearer {credential}"} if credential else {}
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session,
        session.request(method, path, data=body, headers=headers, expect100=len(body) > 65536) as response,
    ):
        data = await response.read()
        told = msgspec.msgpack.decode(data, type=ErrorBody) if response.status >= 400 else None
        return response.status, told


async def raw(port: int, request: bytes) -> bytes:
    """What comes back for these bytes until the other side closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        async with asyncio.timeout(5):
            return await reader.read()
    finally:
        writer.close()


CASES = {
    "no credential": ("/v1/Heartbeat", BEAT, "", 401, "Unauthorised"),
    "a wrong credential": ("/v1/Heartbeat", BEAT, "nonsense", 401, "Unauthorised"),
    "a join token for a credential": ("/v1/Heartbeat", BEAT, "token-worker", 401, "Unauthorised"),
    "an unknown message": ("/v1/Nonsense", BEAT, "secret-worker", 400, "Malformed"),
    "another message's body": ("/v1/Heartbeat", encode(Leave()), "secret-worker", 400, "Malformed"),
    "no msgpack": ("/v1/Heartbeat", b"\xc1\xc1", "secret-worker", 400, "Malformed"),
    "too long a wait": ("/v1/AwaitPolicy", encode(AwaitPolicy(None, 1e9)), "secret-worker", 400, "Malformed"),
    "more held than there can be": ("/v1/AwaitPolicy", TOO_MUCH_HELD, "secret-worker", 400, "Malformed"),
    "bytes of what is no object": ("/v1/AwaitPolicy", NO_ROOT, "secret-worker", 400, "Malformed"),
    "an endless key": ("/v1/CertifyRelay", encode(CertifyRelay(bytes(5000))), "secret-worker", 400, "Malformed"),
    "a learner's relay": ("/v1/CertifyRelay", encode(CertifyRelay(b"")), "secret-learner", 403, "Refused"),
    "a worker's stop": ("/v1/StopRun", encode(StopRun()), "secret-worker", 403, "Refused"),
    "an observer's heartbeat": ("/v1/Heartbeat", BEAT, "secret-observer", 403, "Refused"),
    "a refusal by the service": ("/v1/Leave", encode(Leave()), "secret-worker", 403, "Refused"),
    "a large heartbeat": ("/v1/Heartbeat", bytes(300_000), "secret-worker", 413, "Malformed"),
    "a large enrolment": ("/v1/Enrol", bytes(5000), "", 413, "Malformed"),
    "a wrong token": ("/v1/Enrol", encode(Enrol("x", "w", 1, "0")), "", 401, "Unauthorised"),
}


@pytest.mark.parametrize("kind", CASES)
async def test_a_clients_mistake_gets_one_sentence_and_leaves_no_traceback(
    kind: str, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    path, body, credential, status, error = CASES[kind]
    told_status, told = await ask(port, path, body, credential)
    assert told is not None
    assert (told_status, told.error) == (status, error)
    assert "\n" not in told.message
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert (await ask(port, "/v1/Heartbeat", BEAT))[0] == 200


async def test_a_bug_is_logged_here_and_not_told_there(port: int, caplog: pytest.LogCaptureFixture) -> None:
    status, told = await ask(port, "/v1/GetStatus", encode(GetStatus()))
    assert status == 500
    assert told is not None
    assert "secret" not in told.message
    assert "a bug with a secret in it" in caplog.text


async def test_metrics_need_any_credential_and_health_none(port: int) -> None:
    assert (await ask(port, "/metrics", credential="secret-observer", method="GET"))[0] == 200
    assert (await ask(port, "/metrics", credential="", method="GET"))[0] == 401
    assert (await ask(port, "/healthz", credential="", method="GET"))[0] == 200


async def test_i9_who_may_not_send_is_answered_before_the_body_is_read(port: int) -> None:
    head = b"POST /v1/SubmitGroup HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n"
    assert b" 401 " in (await raw(port, head)).splitlines()[0]
    head = head.replace(b"SubmitGroup", b"Heartbeat").replace(b"Host: x", b"Authorization: Bearer secret-worker")
    assert b" 413 " in (await raw(port, head.replace(b"\r\n\r\n", b"\r\nHost: x\r\n\r\n"))).splitlines()[0]


async def test_a_body_of_undeclared_length_is_refused(port: int) -> None:
    head = (
        b"POST /v1/Heartbeat HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-worker\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    assert b" 411 " in (await raw(port, head)).splitlines()[0]


async def test_h01_a_body_that_nobody_asked_for_does_not_hold_the_connection(port: int) -> None:
    answer = await raw(port, b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nx")
    assert b" 200 " in answer.splitlines()[0]


@pytest.mark.parametrize("announced", [1000, 16 << 20])
async def test_h01_an_announced_body_that_stalls_is_ended(announced: int, port: int) -> None:
    """Raises TimeoutError, in ``raw``, where the time a body gets grows with what was announced of it."""
    head = (
        f"POST /v1/SubmitGroup HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-worker\r\n"
        f"Content-Length: {announced}\r\n\r\nx"
    )
    assert b" 408 " in (await raw(port, head.encode())).splitlines()[0]


def submission(nbytes: int) -> bytes:
    """A body of about so many bytes that the fake service accepts."""
    record = msgspec.Raw(msgspec.msgpack.encode(bytes(nbytes)))
    return encode(SubmitGroup("lease", 1, 1, (RowSubmission(0, RowStatus.FINISHED, record=record),)))


async def at_asgi(app: ASGIApp, body: bytes, arrivals: Callable[[], Iterator[tuple[float, int]]]) -> tuple[int, float]:
    """Status of a submission whose body arrives so (pause before, bytes), and when it was answered."""
    pieces, at, told = arrivals(), 0, list[Message]()

    async def receive() -> Message:
        nonlocal at
        pause_s, nbytes = next(pieces)
        await asyncio.sleep(pause_s)
        piece, at = body[at : at + nbytes], at + nbytes
        return {"type": "http.request", "body": piece, "more_body": at < len(body)}

    async def send(message: Message) -> None:
        told.append(message)

    headers = [(b"authorization", b"Bearer secret-worker"), (b"content-length", str(len(body)).encode())]
    path = {"path": "/v1/SubmitGroup", "raw_path": b"/v1/SubmitGroup", "root_path": "", "query_string": b""}
    scope = {"type": "http", "method": "POST", "headers": headers, "client": ("127.0.0.1", 1), **path}
    await app(scope, receive, send)
    return told[0]["status"], asyncio.get_running_loop().time()


LINES: dict[str, tuple[Callable[[], Iterator[tuple[float, int]]], int, float]] = {
    "64 kbit/s": (lambda: itertools.repeat((1.0, 8000)), 200, 2098),
    "4 Mbit/s": (lambda: itertools.repeat((0.1, 50_000)), 200, 34),
    "nothing": (lambda: itertools.repeat((1e9, 0)), 408, 20),
    "half of it": (lambda: itertools.chain([(1.0, 8 << 20)], itertools.repeat((1e9, 0))), 408, 21),
    "a byte in nine seconds": (lambda: itertools.chain([(1.0, 8 << 20)], itertools.repeat((9.0, 1))), 408, 21),
}


@pytest.mark.parametrize("line", LINES)
def test_h01_a_steady_body_of_sixteen_megabytes_is_waited_for_and_a_stalled_one_is_not(
    line: str, tmp_path: Path
) -> None:
    """Default limits, in virtual time."""
    arrivals, status, seconds = LINES[line]

    async def main() -> tuple[int, float]:
        app = build_app(FakeService(tmp_path), FakeClock())
        return await at_asgi(app, submission(16 << 20), arrivals)

    told, took_s = run_virtual(main())
    assert (told, took_s) == (status, pytest.approx(seconds, abs=1.0))


async def test_h01_fifty_dripping_clients_are_closed_and_disturb_nobody(port: int) -> None:
    async def drip() -> int:
        """Bytes sent before the other side closed."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        closed = asyncio.ensure_future(reader.read())
        sent = 0
        while not closed.done():
            writer.write(b"G")
            sent += 1
            await asyncio.wait((closed,), timeout=0.05)
        writer.close()
        await asyncio.gather(closed, return_exceptions=True)
        return sent

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        drips = [group.create_task(drip()) for _ in range(50)]
        slowest = 0.0
        while not all(task.done() for task in drips):
            began = time.monotonic()
            assert (await ask(port, "/v1/Heartbeat", BEAT))[0] == 200
            slowest = max(slowest, time.monotonic() - began)
    assert slowest < 2.0
    assert all(task.result() < 100 for task in drips)


async def test_a_long_poll_of_a_client_that_left_is_cancelled(service: FakeService, port: int) -> None:
    asking = asyncio.ensure_future(ask(port, "/v1/AwaitPolicy", encode(AwaitPolicy(None, 30.0))))
    async with asyncio.timeout(5):
        await service.polling.wait()
        asking.cancel()
        await service.abandoned.wait()


async def test_a_long_poll_is_answered_when_there_is_news(service: FakeService, port: int) -> None:
    asking = asyncio.ensure_future(ask(port, "/v1/AwaitPolicy", encode(AwaitPolicy(None, 30.0))))
    async with asyncio.timeout(5):
        await service.polling.wait()
        service.news.set()
        assert (await asking)[0] == 200


async def test_one_peer_cannot_flood_and_is_told_when_to_come_back(service: FakeService) -> None:
    clock = FakeClock()
    limits = Limits(requests_per_s=1, request_burst=3, stranger_burst=2, strangers_per_s=1)
    async with serving(build_app(service, clock, limits)) as port:
        assert [(await ask(port, "/v1/Heartbeat", BEAT))[0] for _ in range(5)] == [200, 200, 200, 429, 429]
        assert (await ask(port, "/metrics", credential="secret-observer", method="GET"))[0] == 200
        assert [(await ask(port, "/v1/Heartbeat", BEAT, "x"))[0] for _ in range(3)] == [401, 401, 429]
        clock.now_s += 1
        assert (await ask(port, "/v1/Heartbeat", BEAT))[0] == 200


def test_buckets_of_many_callers_do_not_grow_without_end() -> None:
    buckets = TokenBuckets(1, 2)
    for i in range(3 * TokenBuckets.MOST_CALLERS):
        buckets.wait_s(str(i), 0.0)
    assert len(buckets._buckets) <= TokenBuckets.MOST_CALLERS


async def test_h09_a_herd_of_downloads_keeps_to_the_slots_and_heartbeats_pass(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest, folder = snapshot_of(elements=1 << 17)
    service.lay_out(manifest, folder)
    clock = FakeClock()
    app = build_app(service, clock, Limits(downloads=2, downloads_per_peer=50, download_wait_s=20))
    running = most = total = 0

    async def counting(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        nonlocal running, most, total
        started = False

        async def watch(message) -> None:  # type: ignore[no-untyped-def]
            nonlocal running, most, total, started
            if scope["path"].startswith("/v1/objects/") and message["type"] == "http.response.start":
                started, running = True, running + 1
                most = max(most, running)
            total += len(message.get("body", b""))
            await send(message)

        try:
            await app(scope, receive, watch)
        finally:
            running -= started

    async with serving(counting) as port:
        lines = [HttpTransport(join_to(port), tmp_path / str(i) / "c") for i in range(50)]
        for line in lines:
            clock.now_s += 1
            await line.enrol("w")
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            fetches = [group.create_task(fetch(line, manifest, tmp_path / str(i))) for i, line in enumerate(lines)]
            clock.now_s += 100
            while not all(task.done() for task in fetches):
                began = time.monotonic()
                assert (await ask(port, "/v1/Heartbeat", BEAT))[0] == 200
                assert time.monotonic() - began < 5, "a heartbeat waited for the downloads"
                clock.now_s += 1
        for line in lines:
            await line.close()
    for fetched in fetches:
        assert object_is_whole(fetched.result(), manifest)
    assert most == 2
    assert total < 50 * manifest.object_size * 1.1


async def test_a_reader_that_stops_reading_gives_its_slot_back(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest, folder = snapshot_of(elements=16 << 20)
    service.lay_out(manifest, folder)
    limits = Limits(downloads=1, stall_s=1.0, download_wait_s=10)
    async with serving(build_app(service, FakeClock(), limits), limits=limits) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(
            f"GET /v1/objects/{manifest.object_root} HTTP/1.1\r\nHost: x\r\n"
            "Authorization: Bearer secret-learner\r\n\r\n".encode()
        )
        assert b" 200 " in await reader.readline()
        async with HttpTransport(join_to(port), tmp_path / "c") as line:
            await line.enrol("w")
            async with asyncio.timeout(10):
                await fetch(line, manifest, tmp_path / "w")
        writer.transport.abort()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "TLS"])
async def test_h01_a_client_that_does_not_read_its_answer_is_dropped(encrypted: bool, tmp_path: Path) -> None:
    """Any answer, not downloads alone: one that is far larger than what kernels take and lies ready at once."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 << 20)})

    tls = ensure_certificates(tmp_path, [], utc_now()) if encrypted else None
    trusted = pinned_context(tls.ca_pem, tls.fingerprint) if tls else None
    async with serving(app, tls, Limits(stall_s=0.2)) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024, ssl=trusted)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        ended = select.poll()
        ended.register(writer.get_extra_info("socket").fileno(), 0)
        assert await asyncio.to_thread(ended.poll, 5000), "the connection stays"
        writer.transport.abort()


async def test_an_object_pruned_while_it_is_sent_arrives_whole(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest, folder = snapshot_of(elements=3 << 20)
    service.lay_out(manifest, folder)
    root = manifest.object_root

    def prune_now(block: bytes) -> bytes:
        if root in service.shelf.laid_out:
            service.prune(manifest)
        return block

    app = Faulty(build_app(service, FakeClock()), prune_now)
    async with serving(app) as port, HttpTransport(join_to(port), tmp_path / "c") as line:
        await line.enrol("w")
        assert object_is_whole(await fetch(line, manifest, tmp_path / "w"), manifest)
    assert service.shelf.object_path(root) is None


@pytest.mark.parametrize("method", ["GET", "PUT"])
@pytest.mark.parametrize(
    "name",
    [
        "..",
        "..%2f0.4",
        "%2fetc%2fpasswd",
        "a%00b",
        "0" * 63,
        "0" * 65,
        "A" * 64,
        "0" * 63 + "%0a",
        "\u0660" * 64,  # digits, but not those of a hash
        "9" * 5000,
    ],
)
async def test_e03_what_is_no_root_names_no_object(name: str, method: str, port: int) -> None:
    credential = {"GET": "secret-worker", "PUT": "secret-learner"}[method]
    answer = await raw(
        port,
        f"{method} /v1/objects/{quote(name, safe='%')}?offset=0 HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
        f"Authorization: Bearer {credential}\r\nConnection: close\r\n\r\n".encode(),
    )
    assert answer.split()[1] in (b"400", b"404")


async def test_an_object_that_nobody_offered_is_not_taken_and_one_that_is_not_there_not_served(port: int) -> None:
    path = "/v1/objects/" + "0" * 64
    assert (await ask(port, path, method="GET"))[0] == 403
    status, told = await ask(port, path + "?offset=0", b"x", "secret-learner", "PUT")
    assert told is not None
    assert (status, told.error) == (403, "Refused")
    assert "offer it first" in told.message
    assert (await ask(port, path + "?offset=0", b"x", "secret-worker", "PUT"))[0] == 403


async def test_e03_an_asset_path_never_leaves_the_folder(service: FakeService, port: int) -> None:
    for name in ("..%2fsnapshots", "%2fetc%2fpasswd", "..", "a%00b", "a%5cb"):
        answer = await raw(
            port,
            f"GET /v1/assets/{name} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret-worker\r\n"
            "Connection: close\r\n\r\n".encode(),
        )
        assert answer.split()[1] in (b"403", b"404")


async def test_a_port_in_use_is_the_users_mistake_in_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"127\.0\.0\.1:{number} is not .*choose another port"):
            listen("127.0.0.1", number)
    with pytest.raises(UserError, match=r"not-a-host\.invalid"):
        listen("not-a-host.invalid", 0)


@pytest.mark.parametrize(
    ("header", "span"),
    [(None, (0, 10)), ("bytes=0-9", (0, 10)), ("bytes=3-", (3, 10)), ("bytes=3-99", (3, 10)), ("bytes=9-9", (9, 10))],
)
def test_a_range_is_cut_to_the_file(header: str | None, span: tuple[int, int]) -> None:
    assert parse_range(header, 10)[:2] == span


@pytest.mark.parametrize(
    "header", ["bytes=10-", "bytes=5-4", "bytes=-5", "bytes=0-1,3-4", "lines=1-2", "bytes=a-b", ""]
)
def test_a_range_that_is_none_is_malformed(header: str) -> None:
    with pytest.raises(Malformed):
        parse_range(header, 10)

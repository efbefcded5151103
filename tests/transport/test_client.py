from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path

import msgspec
import pytest
from blake3 import blake3
from loopback import FakeClock, FakeService, Faulty, fetch, impostor, join_to, serving
from snapshots import FullDisk, WriteSnapshot

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.broadcast.signing import open_signed, public_key
from echo2.broadcast.snapshot import load_manifest, verify_snapshot
from echo2.broadcast.unpack import unpack
from echo2.coordinator.http import Limits, build_app
from echo2.errors import DiskFull, IntegrityError, Malformed, Refused, TransportError, Unauthorised, UserError
from echo2.transport.client import HttpTransport
from echo2.transport.credential import store_credential
from echo2.transport.join import JoinString
from echo2.transport.messages import Enrol, Heartbeat, HeartbeatReply, Role, RowSubmission, SubmitGroup, SubmitVerdicts
from echo2.transport.partial import OBJECT_NAME, object_is_whole
from echo2.transport.tls import ensure_certificates, issue_server_certificate, utc_now
from echo2.transport.wire import Deadlines
from echo2.types import RowStatus, Verdict

QUICK = Deadlines(answer_s=10.0, min_rate_bytes_per_s=1 << 20)
BEAT = Heartbeat(None, ())


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path / "run")


@pytest.fixture
async def port(service: FakeService) -> AsyncIterator[int]:
    async with serving(build_app(service, FakeClock())) as number:
        yield number


def transport(port: int, folder: Path, role: Role = Role.WORKER, deadlines: Deadlines = QUICK) -> HttpTransport:
    return HttpTransport(join_to(port, role), folder / role.value / "credential", deadlines)


async def test_a_program_enrols_once_and_its_next_life_reuses_the_credential(
    service: FakeService, port: int, tmp_path: Path
) -> None:
    for _ in range(2):
        async with transport(port, tmp_path) as line:
            enrolled = await line.enrol("w")
            assert (enrolled.peer_id, enrolled.role) == ("worker-1", Role.WORKER)
            assert await line.call(BEAT) == HeartbeatReply(drain=False)
    assert service.enrolments == 1
    path = tmp_path / "worker" / "credential"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert b"token-worker" not in path.read_bytes()


async def test_another_join_string_means_another_enrolment(service: FakeService, port: int, tmp_path: Path) -> None:
    async with transport(port, tmp_path) as line:
        await line.enrol("w")
    other = JoinString("localhost", port, False, "token-learner")
    async with HttpTransport(other, tmp_path / "worker" / "credential", QUICK) as line:
        with pytest.raises(Unauthorised, match="enrol first"):
            await line.call(BEAT)
        assert (await line.enrol("l")).role is Role.LEARNER


async def test_a_wrong_token_is_unauthorised_and_not_repeated(port: int, tmp_path: Path) -> None:
    async with HttpTransport(JoinString("127.0.0.1", port, False, "s3cret"), tmp_path / "c", QUICK) as line:
        with pytest.raises(Unauthorised, match="ask for a new join string") as caught:
            await line.enrol("w")
    assert "s3cret" not in str(caught.value)
    assert not (tmp_path / "c").exists()


async def test_nobody_listening_is_worth_a_retry_and_names_the_address(tmp_path: Path) -> None:
    async with HttpTransport(JoinString("127.0.0.1", 1, False, "s3cret"), tmp_path / "c", QUICK) as line:
        with pytest.raises(TransportError, match=r"http://127\.0\.0\.1:1") as caught:
            await line.enrol("w")
    assert "s3cret" not in str(caught.value)


async def test_h07_a_silent_coordinator_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with (
        impostor(silent) as port,
        HttpTransport(join_to(port), tmp_path / "c", Deadlines(answer_s=0.1)) as line,
    ):
        with pytest.raises(TransportError, match="the deadline passed"):
            await line.enrol("w")


class Line:
    """A relay to ``port`` whose present connections can be made to swallow everything without closing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.connections = 0
        self._dead = 0

    def go_dead(self) -> None:
        """As after a firewall's DROP or a suspended host: no FIN, no RST, no answer. New connections work."""
        self._dead = self.connections

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._port)

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            while block := await source.read(65536):
                if number > self._dead:
                    sink.write(block)
                    await sink.drain()

        try:
            await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))
        finally:
            far_writer.transport.abort()


async def test_h07_a_half_open_connection_is_given_up_in_time_and_the_next_call_opens_another(
    service: FakeService, port: int, tmp_path: Path
) -> None:
    relay = Line(port)
    async with impostor(relay) as through, HttpTransport(join_to(through), tmp_path / "c", QUICK) as line:
        await line.enrol("w")
        await line.call(BEAT)
        opened = relay.connections
        relay.go_dead()
        line._wire.deadlines = Deadlines(answer_s=0.2)
        began = time.monotonic()
        with pytest.raises(TransportError, match="the deadline passed"):
            await line.call(BEAT)
        assert 0.2 <= time.monotonic() - began < 5
        line._wire.deadlines = QUICK
        assert await line.call(BEAT) == HeartbeatReply(drain=False)
        assert relay.connections > opened


async def test_i9_an_endless_answer_is_cut(tmp_path: Path) -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10000000000\r\n\r\n")
        while True:
            writer.write(bytes(1 << 20))
            await writer.drain()

    async with impostor(endless) as port, HttpTransport(join_to(port), tmp_path / "c", Deadlines(answer_s=5)) as line:
        with pytest.raises(Refused, match="must have at most"):
            await line.enrol("w")


async def test_a_large_submission_arrives_and_one_over_the_limit_is_refused_not_retried(
    service: FakeService, tmp_path: Path
) -> None:
    def submission(nbytes: int) -> SubmitGroup:
        return SubmitGroup("lease", 0, 0, (RowSubmission(0, RowStatus.ERROR, error="x" * nbytes),))

    app = build_app(service, FakeClock(), Limits(max_submit_bytes=4 << 20))
    async with serving(app) as port, transport(port, tmp_path) as line:
        await line.enrol("w")
        assert await line.call(submission(3 << 20)) == SubmitVerdicts((Verdict.ACCEPTED,))
        with pytest.raises(Malformed, match="at most 4194304 bytes"):
            await line.call(submission(5 << 20))


async def test_i6_a_snapshot_travels_from_learner_to_worker(
    service: FakeService, port: int, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest, folder = snapshot_of(elements=20_000)
    async with transport(port, tmp_path, Role.LEARNER) as learner, transport(port, tmp_path) as worker:
        await learner.enrol("l")
        assert await service.shelf.offer(manifest) == 0
        await learner.upload(manifest, folder / OBJECT_NAME, 0)
        published = await service.shelf.finish(manifest.policy, manifest.object_root)
        await worker.enrol("w")
        signed = service.shelf.signed(published.entry.root)
        assert signed is not None
        anchor = open_signed(signed, public_key(service.key))
        fetched = await fetch(worker, anchor, tmp_path / "w")
        raw = unpack(anchor, fetched, None, tmp_path / "w" / "0.4")
        assert raw.decoded_root == manifest.decoded_root
        verify_snapshot(tmp_path / "w" / "0.4", load_manifest(folder))
        fetched.write_bytes(bytes(anchor.object_size))
        assert object_is_whole(await fetch(worker, anchor, tmp_path / "w"), anchor)
        with pytest.raises(Refused, match="learner"):
            await worker.upload(manifest, folder / OBJECT_NAME, 0)


def lay_out(service: FakeService, snapshot_of: WriteSnapshot, elements: int = 20_000) -> Manifest:
    """An object of chunks of 1 KiB that the coordinator serves."""
    manifest, folder = snapshot_of(elements=elements)
    service.lay_out(manifest, folder)
    return manifest


def chunks_in(manifest: Manifest, folder: Path) -> set[int]:
    """Chunks that lie right in what was fetched so far."""
    file = ChunkFile(folder / manifest.object_root, manifest)
    found = {number for number in range(len(manifest.chunks)) if file.has(number)}
    file.close()
    return found


async def test_e07_a_download_cut_short_goes_on_where_it_stopped(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest = lay_out(service, snapshot_of, elements=3 << 20)
    sent: list[int] = []

    def cut_at_third_block(block: bytes) -> bytes | None:
        sent.append(len(block))
        return None if len(sent) == 3 else block

    app = Faulty(build_app(service, FakeClock()), cut_at_third_block)
    async with serving(app) as port, transport(port, tmp_path) as worker:
        await worker.enrol("w")
        with pytest.raises(TransportError):
            await fetch(worker, manifest, tmp_path / "w")
        already = len(chunks_in(manifest, tmp_path / "w")) * manifest.chunk_size
        assert already >= 1 << 20
        assert object_is_whole(await fetch(worker, manifest, tmp_path / "w"), manifest)
    assert sum(sent[3:]) == manifest.object_size - already


async def test_only_the_chunks_that_a_relay_left_out_are_asked_for(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest, folder = snapshot_of(elements=20_000)
    service.lay_out(manifest, folder)
    data = (folder / OBJECT_NAME).read_bytes()
    holes = {0, 5, 6, 7, 20, len(manifest.chunks) - 1}
    (tmp_path / "w").mkdir()
    file = ChunkFile(tmp_path / "w" / manifest.object_root, manifest)
    for number in set(range(len(manifest.chunks))) - holes:
        file.put(number, data[number * manifest.chunk_size :][: file.length(number)])
    file.close()
    sent: list[int] = []

    def count(block: bytes) -> bytes:
        sent.append(len(block))
        return block

    async with (
        serving(Faulty(build_app(service, FakeClock()), count)) as port,
        transport(port, tmp_path) as worker,
    ):
        await worker.enrol("w")
        assert object_is_whole(await fetch(worker, manifest, tmp_path / "w"), manifest)
    last = manifest.object_size % manifest.chunk_size
    assert [size for size in sent if size] == [1024, 3 * 1024, 1024, last]


async def test_i6_a_corrupted_chunk_is_refused_and_the_right_ones_are_kept(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest = lay_out(service, snapshot_of)
    broken = [True]

    def flip(block: bytes) -> bytes:
        changed = bytearray(block)
        changed[10_000] ^= broken[0]
        return bytes(changed)

    async with serving(Faulty(build_app(service, FakeClock()), flip)) as port, transport(port, tmp_path) as worker:
        await worker.enrol("w")
        with pytest.raises(IntegrityError, match="chunk 9"):
            await fetch(worker, manifest, tmp_path / "w")
        assert chunks_in(manifest, tmp_path / "w") == set(range(9))
        broken[0] = False
        assert object_is_whole(await fetch(worker, manifest, tmp_path / "w"), manifest)


async def test_e07_a_workers_full_disk_is_told_and_what_it_has_is_continued(
    service: FakeService, port: int, tmp_path: Path, snapshot_of: WriteSnapshot, full_disk: FullDisk
) -> None:
    manifest = lay_out(service, snapshot_of)
    async with transport(port, tmp_path) as worker:
        await worker.enrol("w")
        with full_disk(5000), pytest.raises(DiskFull, match="free space"):
            await fetch(worker, manifest, tmp_path / "w")
        assert chunks_in(manifest, tmp_path / "w") == set(range(4))
        assert object_is_whole(await fetch(worker, manifest, tmp_path / "w"), manifest)


async def test_h01_a_dripping_server_is_given_up(
    service: FakeService, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest = lay_out(service, snapshot_of)

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size = manifest.object_size
        head = f"HTTP/1.1 206 x\r\nContent-Length: {size}\r\nContent-Range: bytes 0-{size - 1}/{size}\r\n\r\n"
        writer.write(head.encode())
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with impostor(drip) as port:
        join = join_to(port)
        store_credential(tmp_path / "c", join, await service.enrol(Enrol(join.token, "w", 1, "0")))
        async with HttpTransport(join, tmp_path / "c", Deadlines(answer_s=0.2, min_rate_bytes_per_s=1 << 20)) as worker:
            with pytest.raises(TransportError, match=r"the deadline passed|come faster"):
                await fetch(worker, manifest, tmp_path / "w")


async def test_h01_a_coordinator_that_stops_reading_a_body_is_given_up(service: FakeService, tmp_path: Path) -> None:
    """After what the kernel may hold, not after what the whole body could take: a second here, not sixteen."""

    async def go_ahead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        await asyncio.Event().wait()

    record = msgspec.Raw(msgspec.msgpack.encode(bytes(32 << 20)))
    submission = SubmitGroup("lease", 1, 1, (RowSubmission(0, RowStatus.FINISHED, record=record),))
    async with impostor(go_ahead) as port:
        join = join_to(port)
        store_credential(tmp_path / "c", join, await service.enrol(Enrol(join.token, "w", 1, "0")))
        deadlines = Deadlines(answer_s=0.2, min_rate_bytes_per_s=1 << 21)
        async with HttpTransport(join, tmp_path / "c", deadlines) as worker, asyncio.timeout(8):
            with pytest.raises(TransportError, match="the deadline passed"):
                await worker.call(submission)


async def test_e05_a_pruned_object_is_refused_so_that_the_worker_asks_for_the_current_path(
    service: FakeService, port: int, tmp_path: Path, snapshot_of: WriteSnapshot
) -> None:
    manifest = lay_out(service, snapshot_of)
    service.prune(manifest)
    async with transport(port, tmp_path) as worker:
        await worker.enrol("w")
        with pytest.raises(Refused, match="ask for the current path"):
            await fetch(worker, manifest, tmp_path / "w")


async def test_assets_travel_and_are_checked(service: FakeService, port: int, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": 1}')
    digest = blake3(b'{"a": 1}').hexdigest()
    async with transport(port, tmp_path, Role.LEARNER) as learner, transport(port, tmp_path) as worker:
        await learner.enrol("l")
        await worker.enrol("w")
        await learner.upload_asset("config.json", tmp_path / "config.json")
        for _ in range(2):
            path = await worker.fetch_asset("config.json", 8, digest, tmp_path / "model")
            assert path.read_bytes() == b'{"a": 1}'
        with pytest.raises(IntegrityError):
            await worker.fetch_asset("config.json", 8, "0" * 64, tmp_path / "other")
        with pytest.raises(Refused):
            await worker.fetch_asset("absent.json", 8, digest, tmp_path / "model")
        for name in ("../x", "/etc/passwd", "a\\b"):  # E03: refused here, before anything is asked for or opened
            with pytest.raises(Malformed):
                await worker.fetch_asset(name, 8, digest, tmp_path / "model")


async def test_tls_with_the_pinned_authority_works_and_with_another_is_refused(
    service: FakeService, tmp_path: Path
) -> None:
    tls = ensure_certificates(tmp_path / "keys", [], utc_now())
    async with serving(build_app(service, FakeClock(), ca_pem=tls.ca_pem), tls) as port:
        async with HttpTransport(join_to(port, tls=tls), tmp_path / "c", QUICK) as line:
            await line.enrol("w")
            assert await line.call(BEAT) == HeartbeatReply(drain=False)
        wrong = JoinString("127.0.0.1", port, True, "token-worker", "ab" * 32)
        async with HttpTransport(wrong, tmp_path / "d", QUICK) as line:
            with pytest.raises(UserError, match="fingerprint"):
                await line.enrol("w")
        unpinned = JoinString("127.0.0.1", port, True, "token-worker")
        async with HttpTransport(unpinned, tmp_path / "d", QUICK) as line:
            with pytest.raises(TransportError, match="certificate is refused"):
                await line.enrol("w")


async def test_h10_rotation_is_taken_up_and_an_expired_certificate_is_refused_by_clients(
    service: FakeService, tmp_path: Path
) -> None:
    tls = ensure_certificates(tmp_path / "keys", [], utc_now())
    async with serving(build_app(service, FakeClock(), ca_pem=tls.ca_pem), tls) as port:

        async def beat(name: str) -> None:
            async with HttpTransport(join_to(port, tls=tls), tmp_path / name, QUICK) as line:
                await line.enrol("w")

        await beat("a")
        issue_server_certificate(tmp_path / "keys", [], utc_now())
        assert "took up" in tls.reload(utc_now())
        await beat("b")
        long_ago = utc_now() - timedelta(days=30)
        issue_server_certificate(tmp_path / "keys", [], long_ago, validity=timedelta(days=1))
        assert "took up" in tls.reload(long_ago)  # a server whose clock is behind
        with pytest.raises(TransportError, match=r"certificate is refused.*expired"):
            await beat("c")

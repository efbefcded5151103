from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from loopback import FakeClock, FakeService, Faulty, join_to, serving
from snapshots import WriteSnapshot

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.broadcast.relay.client import RelayClient, RelayStuck
from echo2.broadcast.relay.control import Announced, Tally
from echo2.coordinator.http import build_app
from echo2.simulation.record import RecordedEvents
from echo2.transport.client import HttpTransport
from echo2.transport.join import JoinString
from echo2.transport.messages import Enrolled, RelayCertificate, Role
from echo2.transport.partial import OBJECT_NAME, object_is_whole
from echo2.types import Policy
from echo2.worker.relay import RelaySource, opening
from echo2.worker.source import HttpSource


class Relay:
    """A relay that brings the first chunks of what it is asked for, and then no more."""

    def __init__(self, manifest: Manifest, data: bytes, folder: Path) -> None:
        self.manifest = manifest
        self.path = folder / manifest.object_root
        self.data = data
        self.chunks = 0
        """How many it brings before it is stuck."""
        self.withdrawn: list[str] = []
        self.asked = 0

    async def bring(self, signed: bytes) -> Path:
        self.asked += 1
        self.path.parent.mkdir(exist_ok=True)
        file = ChunkFile(self.path, self.manifest)
        size = self.manifest.chunk_size
        for number in range(self.chunks):
            file.put(number, self.data[number * size :][: file.length(number)])
        lacking = file.missing()
        file.close()
        if lacking:
            raise RelayStuck(self.path, "nobody has it")
        return self.path

    async def withdraw(self, root: str) -> None:
        self.withdrawn.append(root)

    @property
    def tally(self) -> Tally:
        return Tally(0, 0, 0, {self.manifest.object_root: self.chunks / len(self.manifest.chunks)})


class Setting:
    def __init__(self, line: HttpTransport, relay: Relay, folder: Path, sent: list[int]) -> None:
        self.relay = relay
        self.folder = folder
        self.sent = sent
        self.events = RecordedEvents()
        self.source = RelaySource(HttpSource(line, folder), folder, self.events)
        self.source.use(cast(RelayClient, relay))

    async def bring(self) -> Path:
        return await self.source.bring(encode_manifest(self.relay.manifest), self.relay.manifest)


@pytest.fixture
async def setting(tmp_path: Path, snapshot_of: WriteSnapshot) -> AsyncIterator[Setting]:
    service = FakeService(tmp_path / "run")
    manifest, folder = snapshot_of(elements=20_000)
    service.lay_out(manifest, folder)
    objects = tmp_path / "objects"
    objects.mkdir()
    (objects / ("0" * 64)).write_bytes(b"of an earlier life")
    sent: list[int] = []

    def count(block: bytes) -> bytes:
        sent.append(len(block))
        return block

    async with (
        serving(Faulty(build_app(service, FakeClock()), count)) as port,
        HttpTransport(join_to(port), tmp_path / "c") as line,
    ):
        await line.enrol("w")
        yield Setting(line, Relay(manifest, (folder / OBJECT_NAME).read_bytes(), objects), objects, sent)


async def test_what_the_relays_bring_costs_the_coordinator_nothing(setting: Setting) -> None:
    setting.relay.chunks = len(setting.relay.manifest.chunks)
    assert object_is_whole(await setting.bring(), setting.relay.manifest)
    assert setting.sent == []


async def test_i6_what_the_relays_leave_out_is_fetched_and_then_offered_to_others(setting: Setting) -> None:
    setting.relay.chunks = 30
    path = await setting.bring()
    assert object_is_whole(path, setting.relay.manifest)
    assert sum(setting.sent) == setting.relay.manifest.object_size - 30 * 1024
    assert setting.relay.asked == 2, "the relay looks again at the file that is whole now"
    assert setting.events.kinds("relay_stuck")


async def test_a_relay_that_brings_nothing_and_takes_nothing_changes_nothing(setting: Setting) -> None:
    async def dead(signed: bytes) -> Path:
        raise RelayStuck(setting.relay.path, "the relay process keeps ending")

    setting.relay.bring = dead  # type: ignore[method-assign]
    assert object_is_whole(await setting.bring(), setting.relay.manifest)


async def test_what_is_under_way_is_told(setting: Setting) -> None:
    assert setting.source.received() == {}
    setting.relay.chunks = 30
    await setting.bring()
    manifest = setting.relay.manifest
    assert setting.source.received() == {manifest.object_root: manifest.object_size}


async def test_objects_of_older_versions_are_withdrawn_asked_for_or_not(setting: Setting) -> None:
    manifest = setting.relay.manifest
    setting.relay.chunks = len(manifest.chunks)
    await setting.bring()
    setting.source.announced(Announced("1" * 64, Policy(0, 2)))
    setting.source.announced(Announced("2" * 64, Policy(0, 6)))
    await setting.source.forget_before(manifest.policy)
    assert setting.relay.withdrawn == ["0" * 64, "1" * 64]
    assert [path.name for path in setting.folder.iterdir()] == [manifest.object_root]
    await setting.source.forget_before(Policy(0, 6))
    assert setting.relay.withdrawn[2:] == [manifest.object_root]


async def test_what_is_given_up_comes_no_further_and_leaves_nothing(setting: Setting) -> None:
    manifest = setting.relay.manifest
    setting.relay.chunks = 30
    await setting.bring()
    await setting.source.abandon(manifest.object_root)
    assert setting.relay.withdrawn == [manifest.object_root]
    assert setting.source.received() == {}
    assert manifest.object_root not in [path.name for path in setting.folder.iterdir()]


@pytest.mark.parametrize(
    ("coordinator", "told", "dialled", "listening"),
    [
        ("127.0.0.1", "", "127.0.0.1", "127.0.0.1"),
        ("localhost", "", "localhost", "127.0.0.1"),
        ("::1", "", "::1", "::1"),
        ("10.1.2.3", "", "10.1.2.3", "0.0.0.0"),
        ("fd00::7", "", "fd00::7", "::"),
        ("learner.example", "", "learner.example", "0.0.0.0"),
        ("tunnel.example", "relay.example", "relay.example", "0.0.0.0"),
    ],
)
def test_a_relay_listens_where_others_can_reach_it_and_dials_the_coordinators_host(
    coordinator: str, told: str, dialled: str, listening: str, tmp_path: Path
) -> None:
    join = JoinString(coordinator, 7000, True, "token", "ab" * 32)
    enrolled = Enrolled("worker-1", "secret", Role.WORKER, "run", b"k" * 32)
    order = opening(join, enrolled, RelayCertificate(b"c", b"a", told, 7001), b"key", tmp_path)
    expected: dict[str, Any] = {"seed_host": dialled, "seed_port": 7001, "host": listening, "port": 0}
    assert {name: getattr(order, name) for name in expected} == expected
    assert (order.node_id, order.run_id) == ("worker-1", "run")

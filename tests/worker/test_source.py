from __future__ import annotations

from pathlib import Path

import pytest
from loopback import FakeClock, FakeService, Faulty, join_to, serving
from snapshots import WriteSnapshot

from echo2.broadcast.manifest import Manifest
from echo2.coordinator.http import build_app
from echo2.errors import TransportError
from echo2.transport.client import HttpTransport
from echo2.transport.partial import object_is_whole
from echo2.types import Policy
from echo2.worker.source import HttpSource


@pytest.fixture
def service(tmp_path: Path) -> FakeService:
    return FakeService(tmp_path / "run")


@pytest.fixture
def manifest(service: FakeService, snapshot_of: WriteSnapshot) -> Manifest:
    made, folder = snapshot_of(elements=3 << 20)
    service.lay_out(made, folder)
    return made


async def test_a_download_cut_short_is_told_and_continued(
    service: FakeService, manifest: Manifest, tmp_path: Path
) -> None:
    blocks: list[int] = []

    def cut_at_third_block(block: bytes) -> bytes | None:
        blocks.append(len(block))
        return None if len(blocks) == 3 else block

    app = Faulty(build_app(service, FakeClock()), cut_at_third_block)
    async with serving(app) as port, HttpTransport(join_to(port), tmp_path / "c") as line:
        await line.enrol("w")
        source = HttpSource(line, tmp_path / "objects")
        assert source.received() == {}
        with pytest.raises(TransportError):
            await source.bring(b"", manifest)
        here = source.received()[manifest.object_root]
        assert 0 < here < manifest.object_size
        path = await source.bring(b"", manifest)
    assert object_is_whole(path, manifest)
    assert source.received() == {manifest.object_root: manifest.object_size}
    assert sum(blocks[3:]) == manifest.object_size - here


async def test_objects_of_older_versions_and_those_of_earlier_lives_are_removed(
    service: FakeService, manifest: Manifest, tmp_path: Path
) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    (folder / ("0" * 64)).write_bytes(b"from an earlier life")
    (folder / "notes.txt").write_bytes(b"not ours")
    async with (
        serving(build_app(service, FakeClock())) as port,
        HttpTransport(join_to(port), tmp_path / "c") as line,
    ):
        await line.enrol("w")
        source = HttpSource(line, folder)
        path = await source.bring(b"", manifest)
    await source.forget_before(manifest.policy)
    assert {entry.name for entry in folder.iterdir()} == {path.name, "notes.txt"}
    await source.forget_before(Policy(0, manifest.policy.version + 1))
    assert {entry.name for entry in folder.iterdir()} == {"notes.txt"}
    assert source.received() == {}

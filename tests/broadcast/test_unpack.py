from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from snapshots import FullDisk

from echo2.broadcast.delta import write_delta
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.planes import write_anchor
from echo2.broadcast.snapshot import RawTensor, load_manifest, verify_snapshot, write_snapshot
from echo2.broadcast.unpack import unpack
from echo2.errors import DiskFull, IntegrityError
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy


class Versions:
    """Raw snapshots ``0`` to ``2`` in a folder, deltas between neighbours and an anchor of the last."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raw = [self._write(version) for version in range(3)]
        self.deltas = [write_delta(folder / str(v), folder / str(v + 1), folder / f"delta{v + 1}") for v in range(2)]
        self.anchor = write_anchor(folder / "2", folder / "anchor")

    def _write(self, version: int) -> Manifest:
        random = np.random.default_rng(0)
        bits = (random.standard_normal(4000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        bits[:: 97 + version] += version
        tensors = {"w": RawTensor.of(bits, "BF16"), "b": RawTensor.of(np.full(3, version, np.int64))}
        folder = self.folder / str(version)
        return write_snapshot(
            tensors, {"head": "w"}, run_id="run", policy=Policy(0, version), dtype="bfloat16", folder=folder
        )

    def delta(self, version: int) -> Manifest:
        delta = self.deltas[version - 1]
        assert delta is not None
        return delta

    def apply(self, version: int, base: str, to: str) -> Manifest:
        return unpack(self.delta(version), self.folder / f"delta{version}", self.folder / base, self.folder / to)


@pytest.fixture
def versions(tmp_path: Path) -> Versions:
    return Versions(tmp_path)


def test_i6_any_path_leads_to_the_same_folder(versions: Versions, tmp_path: Path) -> None:
    versions.apply(1, "0", "x1")
    assert versions.apply(2, "x1", "x2") == versions.raw[2]
    assert unpack(versions.anchor, tmp_path / "anchor", None, tmp_path / "y2") == versions.raw[2]
    assert unpack(versions.raw[2], tmp_path / "2" / OBJECT_NAME, None, tmp_path / "z2") == versions.raw[2]
    for folder in ("x2", "y2", "z2"):
        for path in (tmp_path / "2").iterdir():
            assert (tmp_path / folder / path.name).read_bytes() == path.read_bytes()
        verify_snapshot(tmp_path / folder, load_manifest(tmp_path / folder))


def test_a_folder_of_that_name_is_replaced_and_leftovers_are_removed(versions: Versions, tmp_path: Path) -> None:
    (tmp_path / "x.unpacked.aside").mkdir()
    (tmp_path / "x.unpacked.aside" / "junk").write_bytes(b"junk")
    shutil.copytree(tmp_path / "0", tmp_path / "x")
    before = {path.name for path in tmp_path.iterdir()} - {"x.unpacked.aside"}
    assert versions.apply(1, "0", "x") == versions.raw[1]
    assert {path.name for path in tmp_path.iterdir()} == before
    assert not (tmp_path / "x" / "junk").exists()


@pytest.mark.parametrize("base", ["1", "2", None])
def test_i6_another_base_is_refused_before_anything_is_written(
    versions: Versions, tmp_path: Path, full_disk: FullDisk, base: str | None
) -> None:
    folder = None if base is None else tmp_path / base
    with full_disk(0), pytest.raises(IntegrityError, match=r"the delta to 0\.1 applies to 0\.0 of decoded root"):
        unpack(versions.delta(1), tmp_path / "delta1", folder, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))


def test_i6_a_base_that_was_damaged_since_is_found_by_the_result(versions: Versions, tmp_path: Path) -> None:
    data = bytearray((tmp_path / "0" / OBJECT_NAME).read_bytes())
    data[-9] ^= 1
    (tmp_path / "0" / OBJECT_NAME).write_bytes(data)
    with pytest.raises(IntegrityError, match="tensor 'w' did not become what the manifest says"):
        versions.apply(1, "0", "x")
    assert not list(tmp_path.glob("x*"))


@pytest.mark.parametrize("name", ["delta1", "anchor"])
def test_i6_no_flipped_bit_and_no_cut_of_an_object_gets_through(versions: Versions, tmp_path: Path, name: str) -> None:
    manifest = versions.delta(1) if name == "delta1" else versions.anchor
    data = (tmp_path / name).read_bytes()
    for at in {*range(0, len(data), 1 + len(data) // 150), *range(60)}:
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :]):
            (tmp_path / name).write_bytes(damaged)
            try:
                made = unpack(manifest, tmp_path / name, tmp_path / "0", tmp_path / "x")
            except IntegrityError:
                assert not list(tmp_path.glob("x*"))
            else:  # a bit that the decompressor does not look at
                assert made.decoded_root == manifest.decoded_root
                shutil.rmtree(tmp_path / "x")


def test_a_manifest_of_another_result_is_refused(versions: Versions, tmp_path: Path) -> None:
    swapped = msgspec.structs.replace(
        versions.delta(1), tensors=versions.raw[2].tensors, decoded_root=versions.raw[2].decoded_root
    )
    with pytest.raises(IntegrityError, match="did not become"):
        unpack(swapped, tmp_path / "delta1", tmp_path / "0", tmp_path / "x")


def test_a_raw_object_with_another_header_is_refused(versions: Versions, tmp_path: Path) -> None:
    file = tmp_path / "2" / OBJECT_NAME
    file.write_bytes(file.read_bytes().replace(b'"BF16"', b'"F16" ', 1))
    with pytest.raises(IntegrityError, match="header"):
        unpack(versions.raw[2], file, None, tmp_path / "x")


def test_e07_a_full_disk_is_told_and_leaves_nothing(versions: Versions, tmp_path: Path, full_disk: FullDisk) -> None:
    with full_disk(5000), pytest.raises(DiskFull, match="free space"):
        versions.apply(1, "0", "x")
    assert not list(tmp_path.glob("x*"))
    assert versions.apply(1, "0", "x") == versions.raw[1]


def test_e07_a_result_without_room_is_refused_at_once(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=50))
    with pytest.raises(DiskFull, match="its disk has 50"):
        versions.apply(1, "0", "x")
    assert not list(tmp_path.glob("x*"))

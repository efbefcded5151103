from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest, parse_manifest
from echo2.broadcast.planes import MAGIC, SEGMENT_BYTES, write_anchor
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.broadcast.unpack import unpack
from echo2.broadcast.wire import Packer
from echo2.errors import IntegrityError
from echo2.types import Policy, SnapshotKind

RANDOM = np.random.default_rng(0)
BITS = (RANDOM.standard_normal(SEGMENT_BYTES // 2 + 7, np.float32).view(np.uint32) >> 16).astype(np.uint16)
TENSORS = {
    "w": RawTensor.of(BITS, "BF16"),
    "f": RawTensor.of(RANDOM.standard_normal(5000, np.float32)),
    "i": RawTensor.of(np.arange(-500, 500)),
    "b": RawTensor.of(RANDOM.random(999) < 0.5),
    "empty": RawTensor.of(np.zeros((0, 4), np.float32)),
    "scalar": RawTensor.of(np.float32(3).reshape(())),
}


@pytest.fixture
def raw(tmp_path: Path) -> Manifest:
    return write_snapshot(
        TENSORS, {"head": "w"}, run_id="run", policy=Policy(0, 2), dtype="mixed", folder=tmp_path / "a"
    )


def test_an_anchor_saves_a_third_and_unpacks_without_a_base(tmp_path: Path, raw: Manifest) -> None:
    anchor = write_anchor(tmp_path / "a", tmp_path / "anchor")
    assert anchor.object_size == (tmp_path / "anchor").stat().st_size < 0.7 * raw.object_size
    assert (anchor.kind, anchor.codec, anchor.base, anchor.base_root) == (SnapshotKind.ANCHOR, "planes", None, "")
    assert (anchor.decoded_root, anchor.aliases) == (raw.decoded_root, raw.aliases)
    assert parse_manifest(encode_manifest(anchor)) == anchor
    assert unpack(anchor, tmp_path / "anchor", None, tmp_path / "b") == raw


def test_the_same_snapshot_gives_the_same_anchor(tmp_path: Path, raw: Manifest) -> None:
    assert write_anchor(tmp_path / "a", tmp_path / "x") == write_anchor(tmp_path / "a", tmp_path / "y")


def test_a_snapshot_of_nothing_has_an_anchor(tmp_path: Path) -> None:
    nothing = write_snapshot({}, {}, run_id="run", policy=Policy(0, 0), dtype="mixed", folder=tmp_path / "n")
    anchor = write_anchor(tmp_path / "n", tmp_path / "anchor")
    assert unpack(anchor, tmp_path / "anchor", None, tmp_path / "b") == nothing


def test_noise_stays_within_the_limit_of_encoded_objects(tmp_path: Path) -> None:
    noise = RawTensor.of(RANDOM.integers(0, 256, 100_000, np.uint8))
    write_snapshot({"n": noise}, {}, run_id="run", policy=Policy(0, 0), dtype="mixed", folder=tmp_path / "n")
    assert write_anchor(tmp_path / "n", tmp_path / "anchor").object_size < 100_100


def test_a_plane_that_is_too_short_is_refused(tmp_path: Path, raw: Manifest) -> None:
    anchor = write_anchor(tmp_path / "a", tmp_path / "anchor")
    data = (tmp_path / "anchor").read_bytes()
    first = Packer().record([b"\0" * 999] + [b"\0" * 1000] * 7)  # the eight planes of tensor "i"
    (tmp_path / "anchor").write_bytes(MAGIC + first + data[len(MAGIC) + len(first) :])
    with pytest.raises(IntegrityError, match="a plane of 1000 elements must have as many bytes, got 999"):
        unpack(anchor, tmp_path / "anchor", None, tmp_path / "b")
    assert not (tmp_path / "b").exists()

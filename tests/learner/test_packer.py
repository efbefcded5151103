from __future__ import annotations

from pathlib import Path

import numpy as np

from echo2.broadcast.changes import encode_changes
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.broadcast.unpack import unpack
from echo2.learner.packer import DiskPacker, newest_before
from echo2.types import Policy


def snapshot(folder: Path, policy: Policy, changed: int = 3) -> Manifest:
    bits = np.random.default_rng(0).integers(0, 1 << 16, 50_000).astype(np.uint16)
    bits[:changed] ^= policy.version
    tensors = {"w": RawTensor.of(bits, "BF16")}
    return write_snapshot(
        tensors, {}, run_id="run", policy=policy, dtype="bfloat16", folder=folder / str(policy)
    )  # fmt: skip


async def test_the_delta_is_against_the_snapshot_written_before(tmp_path: Path) -> None:
    packer = DiskPacker(encode_changes)
    first = snapshot(tmp_path, Policy(0, 8))
    assert await packer.delta(first, tmp_path / "0.8") is None, "there is none before it"
    snapshot(tmp_path, Policy(0, 10))
    new = snapshot(tmp_path, Policy(0, 12))
    made = await packer.delta(new, tmp_path / "0.12")
    assert made is not None
    manifest, path = made
    assert manifest.base == Policy(0, 10)
    assert manifest.object_size == path.stat().st_size < 1000
    assert unpack(manifest, path, tmp_path / "0.10", tmp_path / "again") == new


async def test_where_everything_changed_the_whole_is_sent(tmp_path: Path) -> None:
    snapshot(tmp_path, Policy(0, 2))
    bits = np.random.default_rng(1).integers(0, 1 << 16, 50_000).astype(np.uint16)
    tensors = {"w": RawTensor.of(bits, "BF16")}
    folder = tmp_path / "0.4"
    new = write_snapshot(tensors, {}, run_id="run", policy=Policy(0, 4), dtype="bfloat16", folder=folder)
    assert await DiskPacker(encode_changes).delta(new, folder) is None


def test_only_complete_older_snapshots_count(tmp_path: Path) -> None:
    for policy in (Policy(0, 2), Policy(0, 9), Policy(1, 4)):
        snapshot(tmp_path, policy)
    (tmp_path / "0.8").mkdir()
    (tmp_path / "0.7.partial").mkdir()
    (tmp_path / "notes").write_text("not a snapshot")
    assert newest_before(Policy(0, 2), tmp_path) is None
    assert newest_before(Policy(0, 9), tmp_path) == tmp_path / "0.2"
    assert newest_before(Policy(1, 4), tmp_path) == tmp_path / "0.9"
    assert newest_before(Policy(1, 6), tmp_path) == tmp_path / "1.4"

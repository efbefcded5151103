from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from echo2.errors import DiskFull, IntegrityError
from echo2.learning import checkpoint
from echo2.learning.checkpoint import LearnerState, complete_steps, load, prune, save, write_safetensors
from echo2.learning.weights import Tensors


def state(step: int) -> LearnerState:
    return LearnerState(step, f"digest-{step}", "initial", "config", "run")


def weights(step: int) -> dict[str, Tensor]:
    return {"w": torch.full((3, 2), float(step)), "a.scalar": torch.tensor(step, dtype=torch.int64)}


def optimizer(step: int) -> dict[str, Tensor]:
    return {"w/exp_avg": torch.arange(6.0).reshape(3, 2) + step, "rng/cpu": torch.get_rng_state()}


def keep(root: Path, step: int) -> Path:
    return save(root, state(step), weights(step), optimizer(step))


def as_before_digests(folder: Path) -> None:
    sizes = json.loads((folder / checkpoint.MARKER).read_text())
    del sizes[checkpoint.DIGESTS]
    (folder / checkpoint.MARKER).write_text(json.dumps(sizes))
    (folder / checkpoint.DIGESTS).unlink()


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    keep(tmp_path, 4)
    found = load(tmp_path, 4)
    assert found.state == state(4)
    for name, tensor in (weights(4) | optimizer(4)).items():
        assert torch.equal((found.weights | found.optimizer)[name], tensor)


def test_the_finder_sees_whole_checkpoints_only(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        keep(tmp_path, step)
    (tmp_path / "step-00000004" / checkpoint.MARKER).unlink()
    with (tmp_path / "step-00000006" / checkpoint.WEIGHTS).open("r+b") as file:
        file.truncate(10)
    (tmp_path / "step-00000008" / checkpoint.STATE).unlink()
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000010.partial")
    assert complete_steps(tmp_path) == [2]


def test_a_folder_that_does_not_exist_holds_no_checkpoint(tmp_path: Path) -> None:
    assert complete_steps(tmp_path / "nothing") == []
    prune(tmp_path / "nothing", 1)


def test_pruning_keeps_the_newest_and_removes_what_interruptions_left(tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        keep(tmp_path, step)
    (tmp_path / "step-00000012.partial").mkdir()
    (tmp_path / "step-00000009").mkdir()
    (tmp_path / "initial.safetensors").write_bytes(b"kept")
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["initial.safetensors", "step-00000010", "step-00000011"]


@pytest.mark.parametrize("full_at", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER, checkpoint.STATE, checkpoint.MARKER])
def test_e07_a_full_disk_leaves_the_previous_checkpoint_and_the_next_attempt_works(
    tmp_path: Path, full_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tmp_path, 2)
    real = os.open

    def without_space(path: Any, *rest: Any, **more: Any) -> int:
        if Path(path).name.startswith(full_at):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *rest, **more)

    monkeypatch.setattr(os, "open", without_space)
    with pytest.raises(DiskFull, match="its disk is full; free space"):
        keep(tmp_path, 4)
    monkeypatch.undo()
    assert complete_steps(tmp_path) == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002"], "half-written bytes were freed"
    keep(tmp_path, 4)
    assert complete_steps(tmp_path) == [2, 4]


def test_a_step_saved_again_replaces_the_older_content(tmp_path: Path) -> None:
    keep(tmp_path, 4)
    save(tmp_path, state(4), {"w": torch.zeros(1)}, {})
    assert set(load(tmp_path, 4).weights) == {"w"}


def test_a_damaged_checkpoint_is_an_integrity_error_that_says_what_to_do(tmp_path: Path) -> None:
    folder = keep(tmp_path, 4)
    data = (folder / checkpoint.WEIGHTS).read_bytes()
    as_before_digests(folder)
    (folder / checkpoint.WEIGHTS).write_bytes(b"\xff" * len(data))
    with pytest.raises(IntegrityError, match="remove it"):
        load(tmp_path, 4)


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.OPTIMIZER])
def test_one_bit_that_fell_over_on_the_disk_is_told_by_the_files_name(tmp_path: Path, name: str) -> None:
    path = keep(tmp_path, 4) / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert complete_steps(tmp_path) == [4], "its size says nothing"
    with pytest.raises(IntegrityError, match=f"{name} must be as it was written"):
        load(tmp_path, 4)


def test_folders_that_are_no_whole_checkpoints_are_named(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        keep(tmp_path, step)
    (tmp_path / "step-00000004" / checkpoint.WEIGHTS).write_bytes(b"cut")
    (tmp_path / "step-00000006" / checkpoint.DIGESTS).unlink()
    assert [path.name for path in checkpoint.torn(tmp_path)] == ["step-00000004", "step-00000006"]


def test_a_checkpoint_of_another_step_is_refused(tmp_path: Path) -> None:
    keep(tmp_path, 4).rename(tmp_path / "step-00000005")
    with pytest.raises(IntegrityError, match="must be of step 5, it says 4"):
        load(tmp_path, 5)


def test_safetensors_files_are_read_by_the_reference_library(tmp_path: Path) -> None:
    tensors = {
        "b": torch.randn(2, 3).bfloat16(),
        "a": torch.tensor(7.0),
        "empty": torch.zeros(0, 4),
        "turned": torch.arange(6).reshape(2, 3).T,
    }
    write_safetensors(tmp_path / "x.safetensors", Tensors.of(tensors))
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())

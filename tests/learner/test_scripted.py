"""The learner that only takes time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo2.broadcast.snapshot import load_manifest, verify_snapshot
from echo2.config.load import build_config
from echo2.errors import ConfigError, IntegrityError, UserError
from echo2.learner.scripted import ScriptedLearner
from echo2.run.folder import RunFolder
from echo2.transport.messages import BatchReply


def config(tmp_path: Path, **rehearsal: Any) -> Any:
    tables = {
        "run": {"dir": str(tmp_path), "name": "run"},
        "rollout": {"engine": "scripted", "rollouts_per_step": 16, "group_size": 4},
        "learning": {"learner": "scripted"},
        "rehearsal": {"snapshot_bytes": 20_000, "train_s": 3.0, **rehearsal},
    }
    return build_config(tables)


def opened(tmp_path: Path, run_id: str = "run-1", **rehearsal: Any) -> tuple[ScriptedLearner, list[float]]:
    learner = ScriptedLearner.open(config(tmp_path, **rehearsal), RunFolder(tmp_path / "run"), run_id)
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    learner.sleep = sleep
    return learner, slept


def batch(step: int) -> BatchReply:
    return BatchReply(step, f"digest {step}", ())


async def test_a_resumed_learner_publishes_the_bytes_of_one_that_was_never_interrupted(tmp_path: Path) -> None:
    straight, _ = opened(tmp_path / "a")
    for step in range(4):
        await straight.train_step(batch(step))
    broken, _ = opened(tmp_path / "b")
    for step in range(2):
        await broken.train_step(batch(step))
    await broken.save_checkpoint()
    await broken.train_step(batch(2))
    resumed, _ = opened(tmp_path / "b")
    assert (resumed.step, resumed.last_batch_digest) == (2, "digest 1")
    for step in (2, 3):
        await resumed.train_step(batch(step))
    one, folder = await straight.write_snapshot(0)
    other, _ = await resumed.write_snapshot(0)
    assert one.object_root == other.object_root
    verify_snapshot(folder, load_manifest(folder))


async def test_a_step_takes_its_pace_and_moves_the_stated_share_of_the_weights(tmp_path: Path) -> None:
    learner, slept = opened(tmp_path, train_spread=0.0, changed=0.1)
    before = await learner.freeze()
    await learner.train_step(batch(0))
    after = await learner.freeze()
    assert slept == [3.0]
    assert (before.weights != after.weights).mean() == pytest.approx(0.1)


async def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    learner, _ = opened(tmp_path)
    for step in range(4):
        await learner.train_step(batch(step))
        await learner.save_checkpoint()
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000003", "step-00000004"]


async def test_checkpoints_of_another_run_and_unreadable_ones_are_refused(tmp_path: Path) -> None:
    learner, _ = opened(tmp_path)
    await learner.train_step(batch(0))
    await learner.save_checkpoint()
    with pytest.raises(UserError, match="must be of run run-2, they are of run run-1"):
        opened(tmp_path, "run-2")
    (tmp_path / "run" / "checkpoints" / "step-00000001" / "state.json").write_text("{")
    with pytest.raises(IntegrityError, match="must be readable"):
        opened(tmp_path)


def test_a_scripted_learner_with_a_real_engine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learning\.learner"):
        build_config({"learning": {"learner": "scripted"}, "model": {"path": "tiny:qwen3"}})

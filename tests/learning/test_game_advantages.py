"""From games to advantages: the keys a task gives are the ones the learner normalises by."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from games import Sampler, calls, games, sandbox_task
from trajectories import batch_of

from echo2.data.sandbox.log import encode_logs
from echo2.learning.batch import BatchRules, form_training_batch
from echo2.types import Trajectory


def rules() -> BatchRules:
    return BatchRules(vocabulary=258, advantage_scale="population", advantage_eps=1e-6)


async def played(normalise: str) -> dict[int, list[Trajectory]]:
    """Six groups of two games; one of each folds at once, the other calls to the end."""
    task = sandbox_task(opponents=["rock"], normalise=normalise)
    groups = {}
    for index in range(6):
        prompt = task.prompt("train", index)
        groups[index] = [(await games(task, prompt, Sampler(first, calls)))[0] for first in ("Action: fold", calls)]
    return groups


async def test_recorded_games_are_rows_without_behaviour_log_probs(tmp_path: Path) -> None:
    """Off-policy: every word of the recorded player bears loss, and the advantages are those of one deal."""
    recorder = sandbox_task(opponents=["rock", "maniac"], logs_together=4)
    path = tmp_path / "logs.jsonl"
    path.write_bytes(encode_logs([log async for log in recorder.record(4)]))
    task = sandbox_task(logs_path=str(path), logs_together=4)
    groups = {0: await games(task, task.prompt("train", 0), Sampler(), count=4)}
    batch = form_training_batch(batch_of(groups), rules())
    assert batch.trainable_tokens == sum(record.sampled_tokens for record in groups[0]) > 0
    assert all(row.behaviour is None for row in batch.rows)
    assert batch.advantages.keys < 4
    assert any(batch.advantages.values)


@pytest.mark.parametrize("normalise", ["deal", "similar", "batch"])
async def test_returns_are_measured_against_those_of_their_key(normalise: str) -> None:
    groups = await played(normalise)
    batch = form_training_batch(batch_of(groups), rules())
    records = [record for group in groups.values() for record in group]
    keys = [record.normalisation_key or f"group {number}" for number, group in groups.items() for record in group]
    assert batch.advantages.keys == len(set(keys))
    assert len(set(keys)) in {"deal": (6,), "similar": (2, 3, 4, 5), "batch": (1,)}[normalise]
    for key in set(keys):
        own = [i for i, other in enumerate(keys) if other == key]
        rewards = np.array([records[i].reward for i in own])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6) if rewards.std() else 0 * rewards
        assert batch.advantages.values[own] == pytest.approx(expected, abs=1e-5)
    for row, record in zip(batch.rows, records, strict=True):
        assert int(row.loss.sum()) == record.sampled_tokens

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from trajectories import VOCABULARY, policy_of, tiny_qwen3

from echo2.errors import UserError
from echo2.learning import memory
from echo2.learning.batch import TrainingRow
from echo2.learning.memory import budget_that_fits, free_bytes, room_of
from echo2.learning.packing import MicroBatch, pack
from echo2.learning.policy_model import PolicyModel


def micros(tokens: int, rows: int, budget: int = 1000) -> list[MicroBatch]:
    ids = np.arange(tokens) % VOCABULARY
    made = [
        TrainingRow(i, ids, np.arange(tokens) > 3, None, 1.0, 1.0, current=True, nucleus=False) for i in range(rows)
    ]
    return pack(made, budget=budget, share_prefixes=False)


def test_what_a_token_keeps_is_measured_on_the_model() -> None:
    """More layers keep more; at least each layer's inputs, 16 floats wide."""
    policy = policy_of(tiny_qwen3())
    assert policy.kept_bytes_per_token > 2 * 16 * 4
    assert memory.kept_bytes_per_token(policy) == policy.kept_bytes_per_token


def test_a_micro_batch_that_does_not_fit_is_split_by_the_rank_with_the_least_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = policy_of(tiny_qwen3())
    monkeypatch.setattr(memory, "free_bytes", lambda: int(100 * policy.kept_bytes_per_token))
    fits, tight = room_of(policy, micros(20, rows=5), 1), room_of(policy, micros(20, rows=10), 1)
    assert (fits.fits, tight.fits) == (None, 70)
    assert budget_that_fits([fits, tight], 1000) == 70
    assert budget_that_fits([fits, fits], 1000) == 1000
    assert room_of(policy, micros(20, rows=5), 2).fits == 35, "two ranks share a machine's memory"


def test_a_trajectory_that_does_not_fit_alone_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tiny_qwen3())
    monkeypatch.setattr(memory, "free_bytes", lambda: int(100 * policy.kept_bytes_per_token))
    rooms = [room_of(policy, [], 1), room_of(policy, micros(120, rows=1), 1)]
    with pytest.raises(UserError, match=r"a trajectory alone has 120: shorten them to 70"):
        budget_that_fits(rooms, 50)


def test_where_the_system_does_not_say_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "MEMORY_FACTS", tmp_path / "absent")
    assert free_bytes() is None
    assert room_of(policy_of(tiny_qwen3()), micros(20, rows=1), 1).fits is None
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:   3 kB\n")
    monkeypatch.setattr(memory, "MEMORY_FACTS", tmp_path / "meminfo")
    assert free_bytes() == 3072


def test_recomputed_activations_take_less_memory_and_give_the_same_gradients() -> None:
    plain, thrifty = (
        PolicyModel(tiny_qwen3(), compute_dtype="float32", logits_chunk_tokens=7, activation_checkpointing=again)
        for again in (False, True)
    )
    assert thrifty.kept_bytes_per_token < plain.kept_bytes_per_token
    for policy in (plain, thrifty):
        for micro in micros(20, rows=3):
            policy.logprobs(micro)[0].sum().backward()
    for name, value in plain.parameters().items():
        found = thrifty.parameters()[name].grad
        assert found is not None and value.grad is not None
        assert torch.equal(found, value.grad)

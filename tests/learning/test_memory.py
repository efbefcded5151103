from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from trajectories import VOCABULARY, policy_of, tiny_qwen3

from echo2.errors import UserError
from echo2.learning import memory
from echo2.learning.batch import TrainingRow
from echo2.learning.memory import free_bytes, require_room
from echo2.learning.packing import MicroBatch, pack


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


def test_a_micro_batch_that_cannot_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(tiny_qwen3())
    monkeypatch.setattr(memory, "free_bytes", lambda: int(100 * policy.kept_bytes_per_token))
    require_room(policy, micros(20, rows=5), budget=100)
    with pytest.raises(
        UserError, match=r"micro_batch_tokens must fit .* of 200 tokens .* \(it is 1000; set it to 70\)"
    ):
        require_room(policy, micros(20, rows=10), budget=1000)
    with pytest.raises(UserError, match=r"a trajectory alone has 120: shorten them to 70"):
        require_room(policy, micros(120, rows=1), budget=50)


def test_where_the_system_does_not_say_nothing_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "MEMORY_FACTS", tmp_path / "absent")
    assert free_bytes() is None
    require_room(policy_of(tiny_qwen3()), micros(20, rows=1), budget=1)
    (tmp_path / "meminfo").write_text("MemTotal:  8 kB\nMemAvailable:   3 kB\n")
    monkeypatch.setattr(memory, "MEMORY_FACTS", tmp_path / "meminfo")
    assert free_bytes() == 3072

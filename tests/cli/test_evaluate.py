from __future__ import annotations

from pathlib import Path

import pytest

from echo2.cli.evaluate import Scores, interval, summarise

from .conftest import Echo2


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\nengine = "scripted"\n[eval]\nprompts = 24\nsamples = 2\n')
    return path


def test_an_evaluation_gives_mean_count_and_interval(echo2: Echo2, run_toml: Path) -> None:
    done = echo2("eval", run_toml, "--json")

    assert done.code == 0, done.err
    low, high = done.json["reward_ci95"]
    assert low <= done.json["reward_mean"] <= high
    assert (done.json["prompts"], done.json["replies"], done.json["failed"]) == (24, 48, 0)
    assert sum(done.json["statuses"].values()) == 48
    assert "24 of 24 prompts scored" in done.err


def test_an_evaluation_repeats(echo2: Echo2, run_toml: Path) -> None:
    assert echo2("eval", run_toml, "--json").out == echo2("eval", run_toml, "--json").out
    assert "held-out prompts" in echo2("eval", run_toml).out


def test_an_evaluation_of_a_game_has_a_row_for_each_opponent(echo2: Echo2, tmp_path: Path) -> None:
    """The paper's Table 4: gain per opponent, here with big blinds per 100 hands on duplicate deals."""
    path = tmp_path / "game.toml"
    path.write_text('[rollout]\nengine = "scripted"\n[eval]\nprompts = 12\n[[tasks]]\nname = "sandbox"\n')
    done = echo2("eval", path, "--json")
    assert done.code == 0, done.err
    rows = done.json["tables"]["sandbox"]
    assert [(row["opponent"], row["games"], row["deals"]) for row in rows] == [
        ("rock", 4, 2), ("maniac", 4, 2), ("counter", 4, 2),
    ]  # fmt: skip
    # The script knows sums and no poker: it says "?" and folds, paying its blind, half one and half two chips.
    assert all(row["bb_per_100"] == 50 * row["gain_per_game"] and row["fault_share"] == 1.0 for row in rows)
    assert "bb_per_100_ci95" in echo2("eval", path).out


def test_a_model_that_is_not_there_is_the_users_mistake(echo2: Echo2, run_toml: Path) -> None:
    done = echo2("eval", run_toml, "--set", "rollout.engine=transformers", "--model", "./absent")

    assert done.code == 2
    assert "must be an existing model directory" in done.faults[0]


def test_the_mean_is_over_prompts_and_failures_are_not_zeros() -> None:
    found = summarise(Scores({"a": [1.0, 0.0], "b": [1.0]}, {"correct": 2, "wrong": 1}, failed=5))

    assert found["reward_mean"] == 0.75
    assert (found["prompts"], found["replies"], found["failed"]) == (2, 3, 5)


def test_the_interval_is_the_normal_one_over_prompts() -> None:
    # Means 0 and 1: standard deviation sqrt(1/2), standard error 1/2.
    assert interval([0.0, 1.0]) == pytest.approx((0.5 - 0.979982, 0.5 + 0.979982))
    assert interval([1.0]) is None
    assert summarise(Scores())["reward_mean"] is None

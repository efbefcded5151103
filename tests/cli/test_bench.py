from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Echo2


@pytest.fixture
def run_toml(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\nengine = "scripted"\ngroup_size = 4\nrollouts_per_step = 8\nconcurrent_groups = 3\n')
    return path


def test_a_machine_is_measured_by_the_work_of_a_worker(echo2: Echo2, run_toml: Path) -> None:
    done = echo2("bench", "engine", run_toml, "--seconds", "0.1", "--json")

    assert done.code == 0, done.err
    found = done.json
    assert found["trajectories"] >= 3 * 4
    assert found["trajectories_per_s"] == pytest.approx(found["trajectories"] / found["seconds"])
    assert found["tokens_per_s"] > found["trajectories_per_s"]
    assert (found["failed"], found["concurrent_groups"]) == (0, 3)
    assert found["load_s"] >= 0 <= found["switch_s"]


def test_people_read_the_rate_and_the_pause_of_an_install(echo2: Echo2, run_toml: Path) -> None:
    done = echo2("bench", "engine", run_toml, "--seconds", "0.1")
    assert "trajectories/s" in done.out
    assert "of pause" in done.out


def test_a_worker_asked_for_an_engine_that_is_none_says_which_there_are(echo2: Echo2) -> None:
    done = echo2("worker", "echo2://nowhere", "--engine", "abacus")
    assert done.code == 2
    assert "engine must be one of transformers, vllm, sglang, parallax, scripted" in done.err

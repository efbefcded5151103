from __future__ import annotations

from pathlib import Path

import pytest

from echo2.cli.evaluate import Scores, difference, interval, summarise

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


@pytest.mark.timeout(300)
def test_a_benchmark_is_reported_by_its_own_metric_beside_others(echo2: Echo2, tmp_path: Path) -> None:
    rows = tmp_path / "aime.jsonl"
    rows.write_text("".join(f'{{"problem": "p{n}", "answer": "{n:03}"}}\n' for n in range(6)) + "{}\n")
    path = tmp_path / "run.toml"
    path.write_text(
        '[rollout]\nengine = "scripted"\n[eval]\nprompts = 12\nsamples = 2\n[[tasks]]\nname = "arithmetic"\n'
        f'[[tasks]]\nname = "aime24"\noptions = {{ path = "{rows}" }}\n'
    )

    done = echo2("eval", path, "--json")

    assert done.code == 0, done.err
    aime, sums = done.json["by_task"]["aime24"], done.json["by_task"]["arithmetic"]
    assert (aime["prompts"], aime["excluded_rows"], aime["metric"]) == (6, 1, "avg@64")
    assert aime["to_report_it"] == "avg@64 needs eval.samples = 64, got 2"
    assert list(aime["measures"]) == ["avg@2", "pass@1", "pass@2"]
    assert sums["measures"]["avg@2"]["value"] == pytest.approx(sums["reward_mean"])
    assert "aime24: avg@2" in echo2("eval", path).out


def test_an_evaluation_of_a_game_has_a_row_for_each_opponent(echo2: Echo2, tmp_path: Path) -> None:
    """The paper's Table 4: gain per opponent, here with big blinds per 100 hands on duplicate deals."""
    path = tmp_path / "game.toml"
    path.write_text('[rollout]\nengine = "scripted"\n[eval]\nprompts = 12\n[[tasks]]\nname = "sandbox"\n')
    done = echo2("eval", path, "--json")
    assert done.code == 0, done.err
    rows = done.json["by_task"]["sandbox"]["table"]
    assert [(row["opponent"], row["games"], row["deals"]) for row in rows] == [
        ("rock", 4, 2), ("maniac", 4, 2), ("counter", 4, 2),
    ]  # fmt: skip
    # The script knows sums and no poker: it says "?" and folds, paying its blind, half one and half two chips.
    assert all(row["bb_per_100"] == 50 * row["gain_per_game"] and row["fault_share"] == 1.0 for row in rows)
    assert "bb_per_100_ci95" in echo2("eval", path).out


@pytest.mark.timeout(120)
def test_tasks_of_one_kind_are_reported_by_their_labels(echo2: Echo2, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[rollout]\nengine = "scripted"\n[eval]\nprompts = 16\n'
        '[[tasks]]\nname = "arithmetic"\nlabel = "small"\noptions = { max_operand = 30 }\n'
        '[[tasks]]\nname = "arithmetic"\nlabel = "large"\nweight = 3\noptions = { max_operand = 99 }\n'
        '[[tasks]]\nname = "sandbox"\nlabel = "duel"\noptions = { sandbox = "moba" }\n'
    )
    done = echo2("eval", path, "--json")
    assert done.code == 0, done.err
    assert {name: found["prompts"] for name, found in done.json["by_task"].items()} == {
        "small": 3, "large": 10, "duel": 3
    }  # fmt: skip
    lines = echo2("eval", path).out.splitlines()
    assert [line.split(":")[0] for line in lines[1:4]] == ["small", "large", "duel"]
    assert "over 10 prompts" in lines[2]
    path.write_text(path.read_text().replace('label = "large"', 'label = "small"'))
    refused = echo2("eval", path)
    assert refused.code == 2
    assert 'must be called something else, got "small" 2 times; give each a label' in refused.err
    path.write_text(path.read_text().replace('label = "duel"', 'label = "a/b"'))
    assert "tasks.2.label must be 1 to 64 letters, digits, dots" in echo2("eval", path).err


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


def test_two_models_are_compared_on_the_same_prompts(echo2: Echo2, tmp_path: Path) -> None:
    """The script plays both, so each deal ends as it did, and no difference is found."""
    path = tmp_path / "game.toml"
    path.write_text('[rollout]\nengine = "scripted"\n[eval]\nprompts = 12\n[[tasks]]\nname = "sandbox"\n')
    done = echo2("eval", path, "--against", "tiny:qwen3", "--json")
    assert done.code == 0, done.err
    assert (done.json["against"], done.json["reward_more"], done.json["reward_more_ci95"]) == (
        "tiny:qwen3",
        0.0,
        [0, 0],
    )
    for row in done.json["by_task"]["sandbox"]["table"]:
        assert (row["bb_per_100_more"], row["bb_per_100_more_ci95"]) == (0.0, [0.0, 0.0])
    shown = echo2("eval", path, "--against", "tiny:qwen3").out
    assert "against tiny:qwen3, on the same prompts: +0.000" in shown


def test_both_models_measures_are_told(echo2: Echo2, run_toml: Path) -> None:
    done = echo2("eval", run_toml, "--against", "tiny:qwen3", "--json")
    assert done.code == 0, done.err
    (found,) = done.json["by_task"].values()
    assert list(found["measures"]) == ["avg@2", "pass@1", "pass@2"]
    assert found["measures_against"] == found["measures"]


def test_a_difference_is_taken_prompt_by_prompt() -> None:
    ours = Scores({"a": [1.0, 0.0], "b": [1.0], "c": [9.0]})
    found = difference(ours, Scores({"a": [0.5], "b": [0.0]}))
    assert found["reward_more"] == 0.5
    assert found["reward_more_ci95"] == pytest.approx((0.5 - 0.979982, 0.5 + 0.979982))
    assert difference(ours, Scores()) == {"reward_more": None, "reward_more_ci95": None}


@pytest.mark.timeout(120)
def test_of_a_runs_folder_the_newest_version_is_scored(echo2: Echo2, tmp_path: Path) -> None:
    tiny = pytest.importorskip("echo2.learning.tiny")
    learned, folder = tmp_path / "learned", tmp_path / "r"
    learned.mkdir()
    tiny.write_tiny_model(learned, 7)
    for version in ("0.0", "0.2"):
        assert echo2("snapshot", "pack", learned, "-o", folder / "snapshots" / version).code == 0
    (folder / "assets").mkdir()
    for path in learned.iterdir():
        if path.suffix != ".safetensors":
            (folder / "assets" / path.name).write_bytes(path.read_bytes())
    (folder / "config.toml").write_text(
        '[run]\nname = "r"\n[model]\npath = "tiny:qwen3"\nsnapshot_dtype = "float32"\n'
        "[rollout]\nmax_new_tokens = 6\n[eval]\nprompts = 16\n"
    )

    done, named = echo2("eval", folder, "--json"), echo2("eval", folder, "--model", learned, "--json")

    assert done.code == named.code == 0, done.err
    assert (done.json["model"], named.json["model"]) == (f"version 0.2 of {folder}", str(learned))
    assert done.json["by_task"] == named.json["by_task"]


def test_a_prompt_whose_replies_fail_is_named_with_the_reason_and_is_no_zero(
    echo2: Echo2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "picky.py").write_text(
        "import sys\n"
        "from echo2.data.task import Score\n"
        "from echo2.data.tasks.arithmetic import Arithmetic\n"
        "class Picky(Arithmetic):\n"
        "    def score(self, prompt, reply):\n"
        "        if prompt.prompt_id.endswith('/1'):\n"
        "            sys.exit(0)\n"
        "        return Score(1.0, 'fine')\n"
        "    def table(self, played, against=None):\n"
        "        raise KeyError('column')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\nengine = "scripted"\n[eval]\nprompts = 4\n[[tasks]]\nname = "picky:Picky"\n')
    done = echo2("eval", path, "--json")
    assert done.code == 0, done.err
    assert (done.json["reward_mean"], done.json["prompts"], done.json["failed"]) == (1.0, 3, 1)
    (fault,) = done.json["faults"]
    assert fault.startswith("picky:Picky/eval/1: a task must not end the program, it raised SystemExit: 0 (")
    assert "must give its table, it raised KeyError: 'column'" in done.err
    assert f"failed: {fault}" in echo2("eval", path).out.splitlines()


def test_rows_that_were_left_out_are_told(echo2: Echo2, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "{n}?", "answer": {n}}}\n' for n in range(20)) + "broken\n")
    path = tmp_path / "run.toml"
    path.write_text(
        '[rollout]\nengine = "scripted"\n[eval]\nprompts = 2\n[[tasks]]\nname = "integer_answers"\n'
        f'options = {{ path = "{rows}" }}\n'
    )
    assert "1 rows left out" in echo2("eval", path).out

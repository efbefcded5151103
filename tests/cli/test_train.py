from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from echo2.config.load import build_config
from echo2.config.objectives import OBJECTIVE_KEYS

from .conftest import Echo2

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("**/*.toml") if path.parent.name != "simulate")


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\nengine = "scripted"\n')
    return path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_example_validates_and_starts_nothing(
    echo2: Echo2, example: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(example.parent))  # where a game of one's own lies
    done = echo2("train", example, "--set", f"run.dir={tmp_path}", "--dry-run", "--json")

    assert done.code == 0, done.err
    period, budget = done.json["publish_period"], done.json["staleness_budget"]
    assert period < budget if done.json["mode"] == "echo2" else budget <= period == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["4b", "8b"])
def test_the_papers_hyper_parameters_are_in_the_qwen3_examples(echo2: Echo2, size: str) -> None:
    plan = echo2("train", ROOT / f"examples/qwen3_{size}/run.toml", "--dry-run", "--json").json

    assert plan["model"] == f"Qwen/Qwen3-{size.upper()}"
    assert (plan["prompts_per_step"], plan["group_size"], plan["rollouts_per_step"]) == (128, 16, 2048)
    assert (plan["max_new_tokens"], plan["temperature"], plan["top_p"]) == (8192, 1.0, 0.95)
    assert (plan["thinking"], plan["updates_per_step"]) == (False, 2)
    assert (plan["staleness_budget"], plan["publish_period"]) == (3, 2)


def test_a_dry_run_says_what_would_run(echo2: Echo2, run_toml: Path) -> None:
    done = echo2("train", run_toml, "--dry-run", "--set", "staleness.budget=6")

    assert done.code == 0
    assert "S = 6, kappa = 5" in done.out
    assert "R = 64 trajectories = P = 8 prompts x n = 8, 2 updates" in done.out
    assert not (run_toml.parent / "runs").exists()


def test_a_dry_run_tells_of_pools_whose_machines_it_cannot_price(echo2: Echo2) -> None:
    shown = echo2("train", ROOT / "examples/pools/tiny.toml", "--dry-run").out

    assert "workers    0 local, 0.05 USD/h with the learner and without the pool (local)" in shown


def test_the_printed_configuration_is_whole_and_loads(echo2: Echo2, run_toml: Path) -> None:
    printed = echo2("train", run_toml, "--print-config", "--set", "learning.lr=3e-6").out

    config = build_config(tomllib.loads(printed))
    assert config.learning.lr == 3e-6
    assert {*tomllib.loads(printed), "pools"} == set(config.model_dump())
    assert "# [[pools]]" in printed, "there are none, and what they would be is told"
    assert echo2("train", run_toml, "--print-config", "--json").json["run"]["name"] == "run"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("staleness.publish_period=3", "2 <= 3 <= 2 is false"),
        ("rollout.rollouts_per_step=7", "set rollout.rollouts_per_step to 8"),
        ("workers.usd_per_h=-1", "workers.usd_per_h must be at least 0, got -1"),
        ("learning.lr=nan", "learning.lr must be a finite number"),
        ("learning.learning_rate=1e-6", "the nearest known key is `lr` in [learning]"),
        ("learning.lr", "--set must have the form section.key=value"),
        ("learning.objective=ppo", 'learning.objective must be one of "grpo", "grpo_paper", "dr_grpo", "dapo"'),
        (
            "learning.second_moment=0.1",
            'learning.second_moment must be left out with learning.objective = "grpo", which does not read it: '
            "remove it, or set learning.objective to m2po",
        ),
        ("learning.clip_low=1.5", "learning.clip_low must be less than 1, got 1.5"),
        ("tasks.0.name=arithmetik", "a task must be one of aime24, arithmetic"),
        ("tasks.0.options.stile=words", "arithmetic has no option 'stile'; did you mean style?"),
        ("tasks.0.name=echo2.absent:Task", "task echo2.absent:Task must be importable here"),
        ("tasks.0.options.path=rows.jsonl", "options.path of task"),
    ],
)
def test_wrong_input_is_one_sentence_and_nothing_is_started(
    echo2: Echo2, run_toml: Path, override: str, words: str
) -> None:
    done = echo2("train", run_toml, "--set", override)

    assert done.code == 2
    assert done.out == ""
    assert len(done.faults) == 1
    assert words in done.faults[0]
    assert [path.name for path in run_toml.parent.iterdir()] == ["run.toml"]


@pytest.mark.parametrize("objective", OBJECTIVE_KEYS)
def test_every_objective_is_chosen_by_one_override(echo2: Echo2, objective: str, tmp_path: Path) -> None:
    chosen = ("train", ROOT / "examples/demo/tiny.toml", "--set", f"learning.objective={objective}")

    assert echo2(*chosen, "--dry-run", "--json").json["objective"] == objective
    printed = echo2(*chosen, "--print-config").out
    for key, value in OBJECTIVE_KEYS[objective].items():
        shown = f'"{value}"' if isinstance(value, str) else str(value)
        assert f"# {key} = {shown}\n" in printed, "what was left open is shown, and stays open when it is loaded"
    assert build_config(tomllib.loads(printed)).learning.objective == objective


def test_several_faults_are_several_lines(echo2: Echo2, run_toml: Path) -> None:
    run_toml.write_text('steps = 3\n[rollout]\nengine = "scripted"\ngroup_size = 1\n[workers]\nusd_per_h = -1\n')

    assert len(echo2("train", run_toml).faults) == 3


def test_a_model_directory_without_a_tokenizer_is_one_sentence(echo2: Echo2, run_toml: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    run_toml.write_text('[model]\npath = "./model"\n')

    done = echo2("train", run_toml)

    assert done.code == 2
    assert "must hold a tokenizer" in done.faults[0]
    assert not (tmp_path / "runs").exists()


def test_a_malformed_file_is_one_sentence(echo2: Echo2, run_toml: Path) -> None:
    run_toml.write_text("[run\nsteps = 1\n")

    done = echo2("train", run_toml)

    assert done.code == 2
    assert "must be valid TOML" in done.faults[0]
    assert "line 1" in done.faults[0]


def test_usage_errors_name_the_command_whose_help_to_read(echo2: Echo2) -> None:
    assert echo2("train").faults == ["Missing argument 'RUN.toml'. (see echo2 train --help)"]
    assert echo2("train", "--bogus", "x").code == 2
    assert echo2("frobnicate").code == 2


def test_a_used_run_folder_is_not_overwritten_and_resume_needs_one(echo2: Echo2, run_toml: Path) -> None:
    resumed = echo2("train", run_toml, "--resume")
    assert resumed.code == 2
    assert "--resume needs a run folder" in resumed.faults[0]

    folder = run_toml.parent / "runs" / "run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(run_toml.read_text())
    again = echo2("train", run_toml)
    assert again.code == 2
    assert "continue it with --resume" in again.faults[0]
    assert echo2("train", folder).code == 2


def test_a_run_folder_that_moved_is_resumed_where_it_lies(echo2: Echo2, run_toml: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "run"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(run_toml.read_text())

    plan = echo2("train", folder, "--resume", "--dry-run", "--json").json
    assert plan["run_folder"] == str(folder)

    renamed = folder.rename(folder.with_name("other"))
    assert echo2("train", renamed, "--resume", "--dry-run").code == 2

"""Committed results of experiments: what is played in virtual time is what it gives today, the rest is as it says."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from echo2.config.load import load_config

ROOT = Path(__file__).parent.parent
EXPERIMENTS = ROOT / "experiments"
SCRIPTS = {
    "beyond/run.py": "results.json",
    "fig1_timeline/run.py": "results.json",
    "fig3a_cost/run.py": "results.json",
    "fig3c_bubble/run.py": "results.json",
    "fig4_broadcast/simulate.py": "simulated.json",
    "staleness_bound/run.py": "results.json",
    "table2_ablation/run.py": "results.json",
}


def _loaded(script: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    spec = importlib.util.spec_from_file_location("experiment", EXPERIMENTS / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # whatever changes a time changes results: rerun the experiments then, and this before a release
@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", SCRIPTS)
def test_the_smallest_case_of_an_experiment_gives_the_committed_row_again(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = _loaded(script, monkeypatch)
    committed = json.loads((EXPERIMENTS / script).with_name(SCRIPTS[script]).read_text())
    assert module.common.rounded(module.row(module.SMALLEST)) in committed["rows"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_an_experiment_says_what_agrees_with_the_paper_and_what_does_not(script: str) -> None:
    readme = (EXPERIMENTS / script).with_name("README.md").read_text()
    assert f"python experiments/{script}" in readme


def test_the_knees_of_the_bubble_lie_where_the_equations_say() -> None:
    judged = json.loads((EXPERIMENTS / "fig3c_bubble/results.json").read_text())["judged"]
    assert len(judged) == 8
    assert all(line["agrees"] for line in judged)


def test_no_batch_of_the_staleness_grid_was_older_than_the_budget() -> None:
    rows = json.loads((EXPERIMENTS / "staleness_bound/results.json").read_text())["rows"]
    assert all(row["staleness_max"] <= row["staleness_budget"] for row in rows)


def test_chains_stay_near_the_unlimited_star() -> None:
    assert json.loads((EXPERIMENTS / "fig4_broadcast/simulated.json").read_text())["judged"]["agrees"]


def test_after_poker_training_fewer_replies_are_no_action() -> None:
    """And every model played the same deals against the same four."""
    results = json.loads((EXPERIMENTS / "table4/results.json").read_text())
    shares = results["fault_share"]
    assert all(share < shares["base"] for name, share in shares.items() if name != "base")
    assert len({(row["opponent"], row["deals"]) for row in results["rows"]}) == 4
    assert len(results["rows"]) == 4 * len(shares)
    assert "python experiments/table4/run.py" in (EXPERIMENTS / "table4/README.md").read_text()


def test_seeds_of_a_poker_condition_are_judged_deal_by_deal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds gain 1 and 3 more than the base on each of two deals: 2 chips a game are 100 bb/100, without spread."""
    table4 = _loaded("table4/run.py", monkeypatch)

    def games(gains: tuple[int, int], faults: int) -> list[Any]:
        return [
            table4.Game("rock", deal, seat, gains[deal], replies=4, faults=faults) for deal in (0, 1) for seat in (0, 1)
        ]

    found = table4.tables({"base": [games((-2, 4), 2)], "self": [games((-1, 5), 0), games((1, 7), 1)]})
    assert [(row["trained_against"], row["seed"]) for row in found["by_seed"]] == [
        ("base", 0), ("self", 0), ("self", 1)
    ]  # fmt: skip
    base, trained = found["rows"]
    assert (base["bb_per_100"], trained["bb_per_100"], trained["seeds"]) == (50.0, 150.0, 2)
    assert (trained["bb_per_100_more"], trained["bb_per_100_more_ci95"]) == (100.0, (100.0, 100.0))
    assert found["fault_share"] == {"base": 0.5, "self": 0.125}


def test_the_smallest_table_of_strategies_is_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = _loaded("table4/strategies.py", monkeypatch)
    committed = json.loads((EXPERIMENTS / "table4/strategies.json").read_text())
    assert strategies.common.rounded(strategies.row(strategies.SMALLEST)) in committed["rows"]


def test_mathematics_was_measured_before_and_after_on_problems_held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    table3 = _loaded("table3/run.py", monkeypatch)
    results = json.loads((EXPERIMENTS / "table3/results.json").read_text())
    assert table3.common.rounded(table3.together(results["by_seed"])) == results["rows"]
    for row in results["by_seed"]:
        assert row["base"].keys() == row["trained"].keys()
        assert row["avg_more"] == pytest.approx(row["trained"]["avg@16"][0] - row["base"]["avg@16"][0], abs=1e-4)
    assert "python experiments/table3/run.py" in (EXPERIMENTS / "table3/README.md").read_text()


@pytest.mark.parametrize(("table", "case"), [("table3", "sums"), ("table3", "chain_sum"), ("table3", "smollm2")])
def test_a_case_of_mathematics_is_a_configuration(table: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = _loaded(f"{table}/run.py", monkeypatch)
    words = module.training.overrides({**module.CASES[case].settings, "run.name": case})
    config = load_config(module.CONFIG, words[1::2])
    assert (config.run.name, set(words[::2])) == (case, {"--set"})
    assert config.tasks[0].options == module.CASES[case].settings.get("tasks.0.options", config.tasks[0].options)


def test_parity_follows_from_its_lines_and_every_mode_of_a_seed_began_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    parity = _loaded("parity/run.py", monkeypatch)
    rows = parity.kept()
    committed = json.loads((EXPERIMENTS / "parity/summary.json").read_text())
    assert parity.common.rounded(parity.summary(rows, parity.prices())) == committed
    assert {row["mode"] for row in rows} == parity.MODES.keys()
    for seed in {row["seed"] for row in rows}:
        assert len({row["held_out_first"] for row in rows if row["seed"] == seed}) == 1
    for row in rows:
        assert row["staleness_max"] <= {"sync": 0, "async": 1, "S=3": 3, "S=4": 4, "shared": 0}[row["mode"]]
        assert len(row["batch_reward"]) == parity.STEPS
    assert "python experiments/parity/run.py" in (EXPERIMENTS / "parity/README.md").read_text()


def test_parity_is_judged_seed_by_seed_and_at_equal_usd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds end 0.1 and 0.3 above their synchronous runs, whose steps cost twice as much; t of one degree of
    freedom is 12.706, and the standard error of (0.1, 0.3) is 0.1."""
    parity = _loaded("parity/run.py", monkeypatch)

    def row(mode: str, seed: int, last: float) -> dict[str, Any]:
        return {
            "mode": mode, "seed": seed, "held_out": [[parity.STEPS, last, 48]], "held_out_first": 0.0,
            "held_out_last": last,
            "batch_reward": [step / parity.STEPS for step in range(parity.STEPS)], "staleness_mean": 0.0,
            "staleness_max": 0, "measured_s": 1.0, "measured_bubble_ratio": 0.0,
        }  # fmt: skip

    rows = [row("sync", 0, 0.5), row("S=3", 0, 0.6), row("sync", 1, 0.4), row("S=3", 1, 0.7), row("S=3", 2, 0.9)]
    (found,) = parity.summary(rows, {"sync": parity.Price(1.0, 2.0), "S=3": parity.Price(1.5, 1.0)})["against_sync"]
    for key in ("held_out_more", "held_out_more_over_the_run"):
        assert found[key] == pytest.approx([0.2, 0.2 - 1.2706, 0.2 + 1.2706], abs=1e-4)
    assert (found["seeds"], found["usd_less_per_step"], found["steps_at_equal_usd"]) == (2, 0.5, [96, 48])
    assert found["batch_reward_more"] == pytest.approx([0.0] * 3)
    assert found["batch_reward_more_at_equal_usd"] == pytest.approx([0.5] * 3)
    # Half of 0.5 and of 0.4: 0.35 and 0.5 more.
    assert found["held_out_more_at_equal_usd"][0] == pytest.approx(0.425)


def test_the_steps_of_parity_cost_what_the_papers_systems_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 x 5.07 USD/h for 1508.2 s are 16.99 USD."""
    prices = _loaded("parity/run.py", monkeypatch).prices()
    assert prices["sync"] == prices["shared"] == pytest.approx((1508.2, 16.9924), rel=1e-5)
    assert prices["async"] == pytest.approx((1582.3, 17.8272), rel=1e-5)
    judged = json.loads((EXPERIMENTS / "fig3a_cost/results.json").read_text())["judged"]
    counted = [line for line in judged if (line["model"], line["rule"]) == ("8B", "overlapped")]
    assert {line["staleness_budget"] for line in counted} == {3, 4}
    for line in counted:
        assert prices[f"S={line['staleness_budget']}"].step_usd == pytest.approx(line["usd_per_step"], rel=1e-4)


@pytest.mark.parametrize("mode", ["sync", "async", "S=3", "S=4", "shared"])
def test_a_mode_of_parity_is_a_configuration(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parity = _loaded("parity/run.py", monkeypatch)
    words = parity.training.overrides({**parity.COMMON, "model.warm_start_steps": 0, **parity.MODES[mode]})
    config = load_config(parity.CONFIG, words[1::2])
    assert config.staleness_budget == {"sync": 0, "async": 1, "S=3": 3, "S=4": 4, "shared": 0}[mode]
    assert parity.STEPS % config.publish_period == config.eval.every_steps % config.publish_period == 0


def test_a_frozen_model_can_be_named_as_an_opponent_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    table4 = _loaded("table4/run.py", monkeypatch)
    named = table4.opponents(table4.CONDITIONS["mixed"], Path("some where"))
    words = table4.training.overrides({"tasks.0.options.opponents": named})
    assert load_config(table4.CONFIG, words[1::2]).tasks[0].options["opponents"] == named
    assert (named[:3], named[3]["options"]["snapshot"]) == ([*table4.BOTS], "some where")


def test_a_run_that_has_ended_is_not_done_again_and_one_cut_short_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training = _loaded("table3/run.py", monkeypatch).training
    said: list[tuple[str, ...]] = []

    def echo2(*words: str | Path) -> dict[str, Any]:
        said.append(tuple(str(word) for word in words[:3]))
        (tmp_path / "sums-0").mkdir(exist_ok=True)
        if len(said) == 1:
            raise KeyboardInterrupt
        return {}

    monkeypatch.setattr(training, "echo2", echo2)
    with pytest.raises(KeyboardInterrupt):
        training.trained(Path("run.toml"), tmp_path, {"run.name": "sums-0"})
    for _ in range(2):
        training.trained(Path("run.toml"), tmp_path, {"run.name": "sums-0"})
    assert said == [("train", "run.toml", "--set"), ("train", str(tmp_path / "sums-0"), "--resume")]


def _staleness(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    return importlib.import_module(f"experiments.staleness.{name}")


def _staleness_line(method: str, staleness: int, seed: int, final: float, **more: Any) -> dict[str, Any]:
    rewards = {str(version): 0.3 if version < 8 else final for version in range(11)}
    line = {"task": "sort", "method": method, "staleness": staleness, "seed": seed, "finite": True, "rewards": rewards}
    return {**line, **more}


def test_a_final_reward_is_compared_with_the_on_policy_run_of_its_own_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = _staleness("summary", monkeypatch)
    finals = {0: [0.5, 0.8], 11: [0.4, 0.72]}
    lines = [_staleness_line("grpo", s, seed, final) for s, own in finals.items() for seed, final in enumerate(own)]
    on_policy, stale = summary.table(lines)
    assert (on_policy["change"], on_policy["lost"]) == (0.0, 0)
    assert stale["change"] == pytest.approx(-0.15)
    assert stale["change_from_default"] == 0
    # two values, -0.2 and -0.1, around their mean: 12.706 times the half of their difference
    assert stale["change_ci95"] == pytest.approx((-0.15 - 12.706 * 0.05, -0.15 + 12.706 * 0.05))


def test_a_run_that_is_not_finite_any_more_has_lost_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = _staleness("summary", monkeypatch)
    lines = [
        _staleness_line("grpo", 0, 0, 0.5),
        _staleness_line("cispo", 20, 0, 0.9, finite=False, rewards={"0": 0.3}),
    ]
    row = summary.table(lines)[-1]
    assert (row["final"], row["change"], row["lost"], row["not_finite"]) == (0.0, -1.0, 1, 1)


def test_a_curve_is_of_the_versions_that_every_seed_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = _staleness("summary", monkeypatch)
    points = summary.curve([{"0": 0.2, "5": 0.4, "10": 0.9}, {"0": 0.3, "5": 0.5}, {"0": 0.4, "5": 0.6}])
    assert [(version, round(mean, 9)) for version, mean, _, _ in points] == [(0, 0.3), (5, 0.5)]
    assert points[0][2:] == pytest.approx((0.3 - 4.303 * 0.1 / 3**0.5, 0.3 + 4.303 * 0.1 / 3**0.5))
    assert summary.curve([{"0": 0.2}, {"0": 0.4}]) == [(0, pytest.approx(0.3), pytest.approx(0.3), pytest.approx(0.3))]


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({3: 0.0, 11: -0.04, 20: -0.09}, True),
        ({3: 0.0, 11: -0.06, 20: -0.09}, False),
        ({3: 0.0, 11: -0.04, 20: -0.11}, False),
        ({3: -0.02, 11: 0.0, 20: 0.0}, False),
        ({3: 0.0, 11: -0.04}, None),
    ],
)
def test_a_default_must_hold_at_every_age_on_both_tasks(
    changes: dict[int, float], verdict: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = _staleness("summary", monkeypatch)
    rows = [
        {
            "task": task,
            "method": "grpo",
            "staleness": staleness,
            "seeds": 10,
            "change": change,
            "change_ci95": (change - 0.01, change + 0.01),
        }
        for task in ("sort", "reverse")
        for staleness, change in changes.items()
    ]
    found = {row["method"]: row for row in summary.judged(rows)}
    assert found["grpo"]["meets_the_goal"] is verdict
    assert found["gepo"]["meets_the_goal"] is None


def test_the_seed_a_choice_was_made_with_judges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    summary = _staleness("summary", monkeypatch)
    lines = [
        _staleness_line("grpo", s, seed, 0.5 if seed or not s else 0.1) for s in (0, 3, 11, 20) for seed in range(4)
    ]
    lines += [{**line, "task": "reverse"} for line in lines]
    assert summary.sums(lines)["judged"][0] == {
        "method": "grpo",
        "S=3": True,
        "S=11": True,
        "S=20": True,
        "meets_the_goal": True,
    }


def test_a_line_of_results_survives_a_writer_that_was_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = _staleness("results", monkeypatch)
    kept = tmp_path / "results.jsonl"
    first, second = (_staleness_line("grpo", 0, seed, 0.5) for seed in (0, 1))
    results.append(kept, first)
    with kept.open("a") as file:
        file.write('{"task": "so')
    results.append(kept, second)
    results.append(kept, {**second, "finite": False})
    assert results.read(kept) == [first, second]


def test_shares_of_the_staleness_runs_are_all_of_them_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = _staleness("cells", monkeypatch)
    for stage in cells.STAGES.values():
        shares = [cell for number in range(3) for cell in cells.of_share(stage, f"{number}/3")]
        assert len(shares) == len(set(shares)) == len(stage)
        assert set(shares) == set(stage)
    assert set(cells.STAGES["all"]) == {*cells.STAGES["screen"], *cells.STAGES["contenders"]}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_batch_of_a_replay_is_exactly_as_old_as_it_must_be(
    staleness: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks, replay = _staleness("tasks", monkeypatch), _staleness("replay", monkeypatch)
    task = dataclasses.replace(tasks.TASKS["sort"], warm_steps=1)
    setting = replay.Setting(steps=4, groups=2, group_size=2, evaluated=4)
    found = replay.replay(task, {"objective": "grpo"}, staleness, 0, tmp_path, setting)
    assert found["max_age"] == staleness
    assert found["mean_age"] == pytest.approx(sum(min(step, staleness) for step in range(4)) / 4)
    assert set(found["rewards"]) == {0, 4}
    assert found["sampler_ratio"] == pytest.approx(1, abs=1e-5)  # the sampler's log-probs are the learner's
    assert found["version_0"] == replay.replay(task, {"objective": "gepo"}, 1, 0, tmp_path, setting)["version_0"]


def test_the_summary_of_the_staleness_runs_is_of_the_committed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    summary, results = _staleness("summary", monkeypatch), _staleness("results", monkeypatch)
    folder = EXPERIMENTS / "staleness"
    committed = json.loads((folder / "summary.json").read_text())
    lines = results.read(folder / "results.jsonl")[: committed["runs"]]
    assert committed == json.loads(json.dumps(summary.common.rounded(summary.sums(lines))))
    assert all(line["max_age"] == line["staleness"] for line in lines if line["finite"])
    versions_0 = {(line["task"], line["seed"], line["version_0"]) for line in lines}
    assert len(versions_0) == len({(task, seed) for task, seed, _ in versions_0})
    assert summary.markdown(summary.table(lines)) in (folder / "README.md").read_text()

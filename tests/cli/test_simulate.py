"""``echo2 simulate``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomlkit
from scenarios import DISTURBED, SMALL, tables

from echo2.cli.output import LEAST_COLUMNS
from echo2.config.sections import Section
from echo2.data.buffer import Buffer
from echo2.report.folder import read_run
from echo2.simulation.outcome import Outcome
from echo2.simulation.scenario import build_scenario, read_scenario
from echo2.simulation.sections import EventSection, OfferSection, WorkersSection, WorldSection

from .conftest import Echo2

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "simulate"
PROMISED = {
    "steps", "virtual_s", "bubble_ratio", "t_bcast_s", "staleness", "cost_usd", "cost_usd_per_step",
    "workers_active_mean", "generated", "trained", "expired",
}  # fmt: skip


def written(path: Path, base: dict[str, Any] = SMALL, **changes: Any) -> Path:
    path.write_text(tomlkit.dumps(tables(base, **changes)), encoding="utf-8")
    return path


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return written(tmp_path / "small.toml")


# ---- what it prints --------------------------------------------------------------------------------------------------


def test_json_is_one_object_with_what_scripts_ask_for(echo2: Echo2, small: Path) -> None:
    done = echo2("simulate", small, "--json")
    assert (done.code, done.err) == (0, "")
    facts = done.json
    assert facts.keys() >= PROMISED
    assert facts["t_bcast_s"].keys() == {"p50", "p90", "max"}
    assert facts["staleness"].keys() == {"mean", "max", "histogram"}
    assert sum(facts["staleness"]["histogram"].values()) == facts["trained"] == 8 * 16
    assert (facts["scenario"], facts["seed"], facts["steps"], facts["warnings"]) == ("small", 0, 8, [])
    states = ("trained", "expired", "refused", "failed", "buffered")
    assert facts["generated"] == sum(facts[state] for state in states)


@pytest.mark.parametrize("columns", ["80", "40"])
def test_the_table_is_whole_in_a_narrow_place(
    echo2: Echo2, small: Path, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    done = echo2("simulate", small, "--set", "world.warm_up_steps=2")
    assert done.code == 0
    assert all(len(line) <= max(int(columns), LEAST_COLUMNS) for line in done.out.splitlines())
    words = " ".join(done.out.split())
    names = ("steps", "bubble", "T_train", "T_bcast", "staleness", "workers", "pool", "cost", "trajectories")
    for name in names:
        assert words.count(f"{name} ") >= 1
    assert "…" not in words
    assert "small, seed 0" in words and "128 trained" in words and "of S = 4" in words
    assert done.err.splitlines() == [
        "-o DIR writes report.html with the plots and the timeline, metrics.jsonl and events.jsonl."
    ]


def test_a_name_that_looks_like_markup_is_only_a_name(echo2: Echo2, tmp_path: Path) -> None:
    done = echo2("simulate", written(tmp_path / "[red]a[b :smile:.toml"))
    assert done.code == 0
    assert "[red]a[b :smile:, seed 0" in done.out


def test_a_pipe_that_takes_ascii_only_gets_it(small: Path) -> None:
    done = process(small, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert "staleness" in done.stdout
    assert done.stdout.isascii()


def test_a_seed_may_be_given_on_the_command_line(echo2: Echo2, small: Path) -> None:
    seven = echo2("simulate", small, "--seed", 7, "--json").json
    assert seven["seed"] == 7
    assert seven["virtual_s"] != echo2("simulate", small, "--json").json["virtual_s"]
    assert echo2("simulate", small, "--set", "world.seed=7", "--json").json == seven


def test_events_that_came_to_nothing_are_warnings(echo2: Echo2, tmp_path: Path) -> None:
    path = written(tmp_path / "late.toml", events=[{"what": "preempt", "who": "card-1", "at_s": 1e9}])
    sentence = "events.0 (preempt card-1 at 1e+09 s) did not happen: the run was over"
    assert echo2("simulate", path, "--json").json["warnings"] == [sentence]
    assert f"echo2: {sentence}" in echo2("simulate", path).err


# ---- what it writes --------------------------------------------------------------------------------------------------


def test_a_run_folder_is_left_for_whoever_reads_one(echo2: Echo2, small: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "run"
    done = echo2("simulate", small, "-o", out)
    assert done.code == 0
    assert done.err == f"report {out / 'report.html'}\n"
    assert {path.name for path in out.iterdir()} == {"config.toml", "metrics.jsonl", "events.jsonl", "report.html"}
    assert len(read_run(out).metrics) == 8
    planned = echo2("plan", out, "--offers", ROOT / "examples" / "plan" / "offers.csv", "--json").json
    assert planned["staleness_budget"] == 4, "a simulated run can be planned with"


def process(path: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "echo2", "simulate", str(path), *arguments], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": "error", **environment},
    )  # fmt: skip


@pytest.mark.timeout(180)
def test_i10_fresh_processes_write_the_same_bytes(echo2: Echo2, tmp_path: Path) -> None:
    """I10 between processes, in which strings hash differently, with everything that can happen in a scenario."""
    path = written(tmp_path / "disturbed.toml", DISTURBED)
    one, two, other = (tmp_path / name for name in ("one", "two", "other"))
    shown = []
    for out, hashes in ((one, "1"), (two, "4294967295")):
        done = process(path, "--json", "-o", str(out), PYTHONHASHSEED=hashes)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert shown[0] == shown[1]
    assert json.loads(shown[0])["losses"]
    for name in ("metrics.jsonl", "events.jsonl", "config.toml"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert echo2("simulate", path, "-o", other, "--seed", 1).code == 0
    for name in ("metrics.jsonl", "events.jsonl"):
        assert (one / name).read_bytes() != (other / name).read_bytes()


# ---- what it refuses -------------------------------------------------------------------------------------------------


def refused(echo2: Echo2, path: Path, *arguments: object) -> str:
    """The one sentence."""
    done = echo2("simulate", path, *arguments, "--json")
    assert (done.code, done.out) == (2, ""), done
    (fault,) = done.faults
    return fault


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "worlds.uplink_mbps=1"], "the nearest section is [world]"),
        (["--set", "world.uplink=1"], "the nearest known key is `uplink_mbps`"),
        (["--set", "workers.0.cuont=1"], "the nearest known key is `count`"),
        (["--set", "world.uplink_mbps=fast"], 'world.uplink_mbps must be a number, got "fast"'),
        (["--set", "world.uplink_mbps=nan"], "world.uplink_mbps must be a finite number"),
        (["--set", "rehearsal.train_s=-1"], "rehearsal.train_s must be at least 0, got -1"),
        (["--set", "rehearsal.group_s=0"], "machines of card must take time"),
        (["--set", "workers=[]"], "a scenario must have somebody to generate"),
        (["--set", "staleness.budget=2"], "staleness.budget (S) must be at least 3 in mode echo2"),
        (["--set", "events=[{what = 'kill', who = 'learner'}]"], "events.0 must have one of at_s and at_step"),
        (["--seed", "-1"], "--seed"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(echo2: Echo2, small: Path, arguments: list[str], words: str) -> None:
    assert words in refused(echo2, small, *arguments)


def test_a_file_that_is_none_is_one_sentence_and_exit_code_2(echo2: Echo2, tmp_path: Path) -> None:
    assert "must exist" in refused(echo2, tmp_path / "absent.toml")
    assert "must be a readable file, but: Is a directory" in refused(echo2, tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'[run]\nname = "\xe9"\n')
    assert "must be UTF-8 text" in refused(echo2, tmp_path / "latin.toml")
    pointing = tmp_path / "pointing.toml"
    pointing.write_text('config = "absent.toml"\n')
    assert "absent.toml must exist" in refused(echo2, pointing)


def test_a_place_that_is_taken_or_none_is_refused_before_anything_is_played(
    echo2: Echo2, small: Path, tmp_path: Path
) -> None:
    assert "must be a new or an empty folder" in refused(echo2, small, "-o", tmp_path)
    assert "must be a folder that can be written" in refused(echo2, small, "-o", small)
    assert "must be a folder that can be written" in refused(echo2, small, "-o", small / "run")
    assert "must be a folder that can be written" in refused(echo2, small, "-o", tmp_path / ("long" * 100))


def test_an_overlap_that_no_pool_can_reach_is_refused_and_played_anyway(echo2: Echo2, small: Path) -> None:
    slow_line = ("--set", "world.uplink_mbps=1", "--set", "world.delta_share=1", "--set", "run.steps=4")
    told = refused(echo2, small, *slow_line)
    assert told.startswith(
        "no pool can keep the learner of this scenario busy: T_bcast must be at most kappa * T_train"
    )
    assert "bring T_bcast down to" in told
    assert told.endswith("--anyway plays it all the same")
    done = echo2("simulate", small, *slow_line, "--anyway", "--json")
    assert done.code == 0
    (warning,) = done.json["warnings"]
    assert warning.startswith("no pool can keep the learner busy: T_bcast must be at most")
    assert done.json["steps"] == 4


# ---- what goes wrong in a run ----------------------------------------------------------------------------------------


def failed(echo2: Echo2, path: Path, *arguments: object) -> str:
    done = echo2("simulate", path, *arguments, "--json")
    assert (done.code, done.out) == (1, ""), done
    (fault,) = done.faults
    return fault


def test_a_run_that_does_not_end_is_one_sentence_and_exit_code_1(echo2: Echo2, small: Path) -> None:
    told = failed(echo2, small, "--set", "world.horizon_h=0.01")
    assert told.startswith("the run must end within world.horizon_h = 0.01 h")
    assert len(told) < 200


def test_a_run_that_nobody_feeds_is_one_sentence_and_exit_code_1(echo2: Echo2, tmp_path: Path) -> None:
    path = written(tmp_path / "gone.toml", events=[{"what": "preempt", "at_s": 40.0}])
    assert "no worker is alive" in failed(echo2, path)


def test_i1_a_run_that_broke_a_promise_has_no_outcome(
    echo2: Echo2, small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """I1"""
    monkeypatch.setattr(Buffer, "oldest_admissible", property(lambda buffer: -1000))
    out = tmp_path / "out"
    slow = ("--set", "rehearsal.snapshot_bytes=600_000_000", "--set", "world.delta_share=0")
    told = failed(echo2, small, *slow, "--set", "run.steps=16", "--set", "rehearsal.group_spread=1.2", "-o", out)
    assert told.startswith("I1: no batch may hold a trajectory older than S = 4 steps")
    assert not list(out.iterdir())


# ---- the examples ----------------------------------------------------------------------------------------------------


def example(echo2: Echo2, name: str, *arguments: object) -> dict[str, Any]:
    done = echo2("simulate", EXAMPLES / name, *arguments, "--json")
    assert (done.code, done.err) == (0, "")
    facts: dict[str, Any] = done.json
    return facts


def test_a_fixed_fleet_waits_less_the_more_staleness_it_may_have(echo2: Echo2) -> None:
    modes = ("sync", "async", "echo2")
    found = [example(echo2, "fixed.toml", "--set", f"run.mode={mode}", "--set", "run.steps=10") for mode in modes]
    bubbles = [facts["bubble_ratio_settled"] for facts in found]
    assert bubbles[0] > 0.4 > bubbles[1] > 0.05 > bubbles[2]
    assert [facts["staleness"]["max"] for facts in found] == [0, 1, 4]


def test_a_rented_pool_with_faults_is_filled_again_and_again(echo2: Echo2) -> None:
    facts = example(echo2, "faults.toml")
    assert facts["steps"] == 40
    assert facts["losses"] > 3
    assert facts["activations"] > facts["losses"]
    assert facts["bubble_ratio_settled"] < 0.15
    assert facts["warnings"] == []


def test_the_market_of_the_paper_is_playable(echo2: Echo2) -> None:
    facts = example(echo2, "vast.toml", "--set", "run.steps=2")
    assert facts["trained"] == 2 * 2048


def test_the_help_says_where_to_read_on(echo2: Echo2) -> None:
    assert "docs/simulation.md" in echo2("simulate", "--help").out
    assert (ROOT / "docs" / "simulation.md").is_file()


MODELS = (WorldSection, WorkersSection, OfferSection, EventSection)
PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_the_page_mentions_every_key(model: type[Section]) -> None:
    assert [key for key in model.model_fields if f"`{key}`" not in PAGE] == []


def test_the_page_mentions_every_field_of_the_outcome() -> None:
    fields = [*Outcome.__struct_fields__, "scenario", "seed", "warnings"]
    assert [field for field in fields if f"`{field}`" not in PAGE] == []


def test_the_pages_scenario_is_one(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    (shown,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    made = build_scenario(tomllib.loads(shown), base=tmp_path)
    assert (len(made.worker_models()), len(made.offers), len(made.events)) == (3, 1, 1)


@pytest.mark.parametrize("base", [SMALL, DISTURBED], ids=["small", "disturbed"])
def test_the_printed_scenario_is_whole_and_is_the_same(echo2: Echo2, tmp_path: Path, base: dict[str, Any]) -> None:
    path = written(tmp_path / "scenario.toml", base)
    printed = echo2("simulate", path, "--print-scenario", "--set", "world.seed=9")
    assert (printed.code, printed.err) == (0, "")
    assert "# B_0: the coordinator's line, shared by all transfers from it." in printed.out
    again = build_scenario(tomllib.loads(printed.out), name="scenario")
    assert again == read_scenario(path, ["world.seed=9"])
    assert echo2("simulate", path, "--print-scenario", "--json").json["world"]["seed"] == 0


def test_numbers_of_json_are_json(echo2: Echo2, small: Path) -> None:
    def no_constants(name: str) -> float:
        raise AssertionError(name)

    json.loads(echo2("simulate", small, "--json").out, parse_constant=no_constants)

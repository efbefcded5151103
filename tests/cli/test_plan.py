from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from echo2.metrics import StepMetrics

from .conftest import Echo2, Outcome

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "plan" / "offers.csv"
HEADER = "name,gpu,count,usd_per_h,rollouts_per_s"
PAPER = ("--t-train", 1631.2, "--t-bcast", 1310, "--rollouts-per-step", 2048, "--staleness", 3)
QWEN3_8B = ("--parameters", 8.2e9, "--kv-bytes-per-token", 147456, "--reply-tokens", 3500, "--group-size", 16)
PROMISED = {
    "feasible", "staleness_budget", "publish_period", "mu_min_per_s", "mu_min_overlapped_per_s", "mu_target_per_s",
    "staleness_bound", "staleness_bound_tight", "selected", "mu_selected_per_s", "cost_usd_per_h", "cost_usd_per_step",
    "predicted_bubble_ratio",
}  # fmt: skip


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture
def offers(tmp_path: Path) -> Path:
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER}\n5090,RTX5090,10,0.51,0.20\n4090,RTX4090,40,0.40,0.10\n")
    return path


def refused(done: Outcome) -> str:
    """The one sentence of a refusal."""
    assert done.code == 2
    (fault,) = done.faults
    return fault


def test_the_papers_case_from_flags(echo2: Echo2, offers: Path) -> None:
    # (2') asks for 2048 / 1631.2 = 1.2555/s, 1.3811 with gamma: seven of the first, 3.57 USD/h, 1.6176 USD a step
    plan = echo2("plan", *PAPER, "--offers", offers, "--json").json
    assert set(plan) >= PROMISED
    assert (plan["feasible"], plan["staleness_budget"], plan["publish_period"]) == (True, 3, 2)
    assert plan["mu_min_per_s"] == pytest.approx(2.0979, abs=1e-4)
    assert plan["mu_min_overlapped_per_s"] == pytest.approx(1.2555, abs=1e-4)
    assert plan["mu_target_per_s"] == pytest.approx(1.3811, abs=1e-4)
    assert (plan["staleness_bound"], plan["staleness_bound_tight"], plan["overlap_holds"]) == (3, 3, False)
    (picked,) = plan["selected"]
    assert (picked["name"], picked["count"], picked["estimated"]) == ("5090", 7, False)
    assert plan["mu_selected_per_s"] == pytest.approx(1.4)
    assert plan["cost_usd_per_h"] == pytest.approx(3.57)
    assert plan["cost_usd_per_step"] == pytest.approx(3.57 * 1631.2 / 3600)
    assert plan["predicted_bubble_ratio"] == 0.0
    assert plan["tenth_of_t_bcast"]["saves_usd_per_h"] == pytest.approx(0.0)


def test_the_papers_rule_and_the_learners_price(echo2: Echo2, offers: Path) -> None:
    asked = ("--offers", offers, "--rule", "paper", "--learner-usd-per-h", 20, "--json")
    plan = echo2("plan", *PAPER, *asked).json
    assert plan["mu_target_per_s"] == pytest.approx(2.3077, abs=1e-4)
    assert (plan["workers_usd_per_h"], plan["cost_usd_per_h"]) == (pytest.approx(6.70), pytest.approx(26.70))
    assert plan["cost_usd_per_step"] == pytest.approx(26.70 * 1631.2 / 3600)
    assert plan["tenth_of_t_bcast"]["saves_usd_per_h"] == pytest.approx(6.70 - 3.97)


@pytest.mark.parametrize(
    "question",
    [
        (), ("--rule", "paper"), ("--policy", "random"), ("--publish-period", "auto"), ("--use-all",),
        ("--budget-usd-per-h", 2), ("--learner-usd-per-h", 20), ("--snapshot-gb", 16.4),
    ],
)  # fmt: skip
def test_people_get_it_within_eighty_columns(echo2: Echo2, question: tuple[Any, ...]) -> None:
    done = echo2("plan", *PAPER, "--offers", EXAMPLE, *question)
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= 80
    assert "…" not in done.out
    for words in ("S = 3, kappa = 2", "by (2), 1.26/s by (2')", "T_bcast / 10", "vast-5090", "bubble"):
        assert words in done.out


@pytest.mark.parametrize("policy", ["cheapest", "exact", "greedy", "random"])
def test_every_policy_can_be_chosen(echo2: Echo2, offers: Path, policy: str) -> None:
    if policy == "exact":
        pytest.importorskip("scipy")
    plan = echo2("plan", *PAPER, "--offers", offers, "--policy", policy, "--json").json
    assert (plan["policy"], plan["feasible"]) == (policy, True)
    assert plan["mu_selected_per_s"] >= plan["mu_target_per_s"]


@pytest.mark.parametrize(
    ("line", "t_bcast_s"),
    [
        (("--snapshot-gb", 16, "--worker-mbps", 1000), 128.0),
        (("--snapshot-gb", 16, "--worker-mb-per-s", 125), 128.0),
        (("--snapshot-gib", 16, "--worker-mbps", 1000), 137.438953472),
    ],
)
def test_f05_a_size_over_a_line_is_the_same_in_either_unit(
    echo2: Echo2, offers: Path, line: tuple[Any, ...], t_bcast_s: float
) -> None:
    asked = ("--t-train", 1631.2, "--rollouts-per-step", 2048, "--staleness", 3, "--offers", offers)
    assert echo2("plan", *asked, *line, "--json").json["t_bcast_s"] == pytest.approx(t_bcast_s)


@pytest.mark.parametrize(
    ("flag", "text", "words"),
    [
        ("--worker-mbps", "100Mbps", "(Mbps), got '100Mbps'; that is 100 Mbps, so write 100"),
        ("--worker-mbps", "100 MB/s", "(Mbps), got '100 MB/s'; that is 800 Mbps, so write 800"),
        # An amount and no rate, or a prefix that means something else: "1" or "1000" alone may be wrong by far.
        ("--worker-mbps", "1Gbit", "(Mbps), got '1Gbit'; convert it to Mbps and write the number alone"),
        ("--worker-mbps", "1000mbps", "(Mbps), got '1000mbps'; convert it to Mbps and write the number alone"),
        ("--worker-mb-per-s", "1000Mbps", "(MB per second), got '1000Mbps'; that is 125 MB/s, so write 125"),
        ("--snapshot-gb", "16GiB", "(GB), got '16GiB'; that is 17.1799 GB, so write 17.1799"),
        ("--snapshot-gib", "16 GB", "(GiB), got '16 GB'; that is 14.9012 GiB, so write 14.9012"),
        ("--t-train", "15min", "(seconds), got '15min'; convert it to seconds and write the number alone"),
    ],
)
def test_f05_a_unit_in_a_value_is_refused_with_what_to_write(echo2: Echo2, flag: str, text: str, words: str) -> None:
    fault = refused(echo2("plan", flag, text))
    assert fault.startswith(f"Invalid value for '{flag}': must be a plain number")
    assert words in fault


NUMBERS = (
    "--t-train", "--t-bcast", "--rollouts-per-step", "--gamma", "--snapshot-gb", "--snapshot-gib", "--worker-mbps",
    "--worker-mb-per-s", "--learner-usd-per-h", "--rental-h", "--budget-usd-per-h", "--pool-rate", "--parameters",
    "--kv-bytes-per-token", "--prompt-tokens", "--reply-tokens", "--group-size", "--efficiency", "--machines",
    "--publish-period",
)  # fmt: skip


@pytest.mark.parametrize("flag", NUMBERS)
def test_no_flag_takes_a_number_that_is_none(echo2: Echo2, flag: str) -> None:
    for text in ("nan", "inf", "-1", "0", "1e999", "fast", "", "1,5"):
        fault = refused(echo2("plan", flag, text))
        assert fault.startswith(f"Invalid value for '{flag}': must be "), fault
        assert "row" not in fault


@pytest.mark.parametrize(
    ("kappa", "staleness", "words"),
    [
        (2, 2, "2 <= kappa <= S - 1 must hold, got kappa = 2 with S = 2; set S to 3"),  # (a)
        (1, 3, "2 <= kappa <= S - 1 must hold, got kappa = 1 with S = 3; set kappa to 2"),  # (d)
    ],
)
def test_f04_an_illegal_kappa_is_refused(echo2: Echo2, offers: Path, kappa: int, staleness: int, words: str) -> None:
    asked = ("--t-train", 100, "--t-bcast", 100, "--rollouts-per-step", 128, "--offers", offers)
    assert words in refused(echo2("plan", *asked, "--staleness", staleness, "--publish-period", kappa))


@pytest.mark.parametrize("rule", ["paper", "overlapped"])
@pytest.mark.parametrize("t_bcast", [200, 201])
def test_f04_a_dissemination_of_a_whole_period_is_refused_and_the_advice_works(
    echo2: Echo2, offers: Path, t_bcast: int, rule: str
) -> None:
    """(b): never a negative or infinite worker count."""
    asked = ("plan", "--t-train", 100, "--rollouts-per-step", 128, "--offers", offers, "--rule", rule)
    wrong = ("--t-bcast", t_bcast, "--staleness", 3, "--publish-period", 2)
    done = echo2(*asked, *wrong, "--json")
    fault = refused(done)
    assert f"{t_bcast} s" in fault
    assert "200 s" in fault
    assert (done.json["feasible"], done.json["selected"], done.json["mu_target_per_s"]) == (False, [], None)
    assert done.json["reason"] == fault
    assert set(done.json) >= PROMISED
    assert echo2(*asked, *wrong).out == ""
    for way in done.json["ways_out"]:
        flags = {"--t-bcast": t_bcast, "--staleness": 3, "--publish-period": 2}
        flags["--staleness"] = way.get("staleness_budget", 3)
        flags["--publish-period"] = way.get("publish_period", 2)
        flags["--t-bcast"] = way.get("t_bcast_s", t_bcast)
        assert echo2(*asked, *(part for pair in flags.items() for part in pair)).code == 0, way
    assert len(done.json["ways_out"]) >= 2


def test_f04_workers_of_2_55_are_too_few_and_of_2_56_just_enough(echo2: Echo2, tmp_path: Path) -> None:
    """(c): 2 * 128 / (2 * 100 - 100) = 2.56/s by (2), before the safety factor."""
    asked = ("--t-train", 100, "--t-bcast", 100, "--rollouts-per-step", 128, "--staleness", 3, "--rule", "paper")
    for rate, code in (("2.55", 2), ("2.56", 0)):
        path = tmp_path / "offers.csv"
        path.write_text(f"{HEADER}\nw,RTX5090,1,0.5,{rate}\n")
        for question in (("--gamma", 1, "--offers", path), ("--use-all", "--offers", path), ("--pool-rate", rate)):
            done = echo2("plan", *asked, *question, "--publish-period", 2)
            assert done.code == code, (rate, question, done.err)
            if code:
                assert "2.56 trajectories/s" in refused(done)
                assert "got 2.55" in refused(done)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("x,RTX5090,1,0.000,0.2", "offers.csv, row 2, column usd_per_h: must be more than 0"),
        ("x,RTX5090,1,nan,0.2", "offers.csv, row 2, column usd_per_h: must be a plain number"),
        ("x,RTX5090,1,0.5,-1", "offers.csv, row 2, column rollouts_per_s: must be more than 0"),
        ("x,RTX5090,1,€0.5,0.2", "offers.csv, row 2, column usd_per_h: must be a plain number (USD per hour)"),
        ("", "offers.csv must hold at least one offer below its header, got none"),
    ],
)
def test_i01_bad_offers_are_told_by_row_and_column(echo2: Echo2, tmp_path: Path, row: str, words: str) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER}\n{row}\n", encoding="utf-8")
    done = echo2("plan", *PAPER, "--offers", path, "--json")
    assert words in refused(done)
    assert done.out == ""


def test_i01_a_catalogs_zero_is_no_price_and_its_age_is_told(echo2: Echo2, tmp_path: Path) -> None:
    """The last row of a kind says 0.000, as in the report; the file is five days old."""
    folder = tmp_path / "v8" / "vast"
    folder.mkdir(parents=True)
    (folder / "vms.csv").write_text(
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region\n"
        "1x-5090,RTX5090,1,16,32,,0.50,0.30,Utah\n1x-5090,RTX5090,1,16,32,,0.000,0.000,Utah\n"
        "1x-l4,L4,1,16,32,,0.1,0.1,Utah\n"
    )
    five_days_ago = (folder / "vms.csv").stat().st_mtime - 5 * 86400
    os.utime(folder / "vms.csv", (five_days_ago, five_days_ago))
    for path in (tmp_path / "v8", folder, folder / "vms.csv"):
        plan = echo2("plan", *PAPER, "--offers", path, "--measured", "RTX5090=0.2", "--json").json
        (picked,) = plan["selected"]
        assert (picked["usd_per_h"], picked["count"], picked["estimated"]) == (0.50, 7, False)
        notes = " ".join(plan["notes"])
        assert "5.0 days old" in notes
        assert "1 left out: Price is missing, zero or no number" in notes
        assert "left out, without a throughput: 1 machines with L4" in notes
    cheap = echo2("plan", *PAPER, "--offers", folder, "--spot", *QWEN3_8B, "--json").json["selected"][0]
    assert (cheap["usd_per_h"], cheap["estimated"]) == (0.30, True)


def test_estimates_are_marked_wherever_they_go_and_give_way_to_measurements(echo2: Echo2, tmp_path: Path) -> None:
    asked = ("plan", *PAPER, "--offers", "prices", *QWEN3_8B)
    plan = echo2(*asked, "--json").json
    assert plan["estimated"]
    assert all(picked["estimated"] for picked in plan["selected"])
    assert any("2026-11-30" in note for note in plan["notes"])
    shown = echo2(*asked).out
    assert "(estimated)" in shown
    assert shown.count(" estimate") >= 2
    known = echo2(*asked, *(x for gpu in ("RTX5090", "A100-80GB") for x in ("--measured", f"{gpu}=1.0")), "--json").json
    assert not known["estimated"]
    path = tmp_path / "mixed.csv"
    path.write_text(f"{HEADER}\nknown,RTX4090,1,0.4,0.1\nopen,RTX5090,40,0.5,\n")
    for flags, estimated in ((QWEN3_8B, True), (("--measured", "rtx 5090=0.3"), False)):
        picked = echo2("plan", *PAPER, "--offers", path, *flags, "--json").json["selected"]
        assert [one["estimated"] for one in picked if one["name"] == "open"] == [estimated]
    assert "row 3, column rollouts_per_s: must be a plain number" in refused(echo2("plan", *PAPER, "--offers", path))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "--t-train, --t-bcast (or --snapshot-gb with --worker-mbps), --rollouts-per-step are missing"),
        (PAPER[:6], "it is missing: give --staleness, 3 or more"),
        (PAPER, "give --offers with a CSV file, a SkyPilot catalog or the word prices"),
        ((*PAPER, "--worker-mbps", 100), "T_bcast must be given once"),
        ((*PAPER[:2], "--worker-mbps", 100), "must come with a size: give --snapshot-gb"),
        (("--snapshot-gb", 1, "--snapshot-gib", 1), "--snapshot-gb or --snapshot-gib, not both"),
        (("--worker-mbps", 1, "--worker-mb-per-s", 1), "--worker-mbps or --worker-mb-per-s, not both"),
        (("--use-all", "--pool-rate", 1), "one question must be asked at a time"),
        (("--use-all", "--policy", "exact"), "--policy must be left out"),
        (("--pool-rate", 1, "--offers", "x.csv"), "--pool-rate must be given without --offers"),
        ((*PAPER, "--offers", "absent.csv"), "there is no such file"),
        ((*PAPER, "--offers", "x" * 5000), "File name too long"),
        (("x" * 5000,), "a plan must be for a configuration or a run's folder, but File name too long"),
        ((*PAPER, "--offers", "prices"), "prices without throughput: give --parameters"),
        ((*PAPER, "--offers", "prices", "--parameters", 8e9), "got none for --kv-bytes-per-token, --reply-tokens"),
        ((*PAPER, "--offers", "prices", "--measured", "RTX5090"), "--measured RTX5090 must have a number"),
        ((*PAPER, "--offers", "prices", "--measured", "RTX5090=fast"), "--measured RTX5090: must be a plain number"),
        ((*PAPER, "--offers", "prices", "--measured", "=1"), "--measured must be GPU or GPU=PER_S"),
        ((*PAPER, "--offers", "prices", "--measured", "L4=1"), "must have a machine of known throughput"),
        ((*PAPER, "--offers", "prices", "--spot"), "--spot must come with a SkyPilot catalog"),
        ((*PAPER, "--offers", EXAMPLE, "--spot"), "is a list of offers"),
        ((*PAPER, "--offers", EXAMPLE, "--budget-usd-per-h", 5, "--learner-usd-per-h", 6), "the learner alone costs 6"),
        ((*PAPER, "--offers", EXAMPLE, "--budget-usd-per-h", 0.1), "raise the budget by"),
        ((*PAPER[:6], "--staleness", 1001), "must be at most 1000 (steps)"),
    ],
)  # fmt: skip
def test_what_is_missing_or_contradicts_is_one_sentence(echo2: Echo2, flags: tuple[Any, ...], words: str) -> None:
    done = echo2("plan", *flags)
    assert words in refused(done)
    assert done.out == ""


def test_a_budget_gives_the_shortest_step_and_pays_for_the_learner(echo2: Echo2, offers: Path) -> None:
    # 2.04 USD/h are left for four workers: 2048 / 0.8 = 2560 s
    asked = ("--offers", offers, "--budget-usd-per-h", 12.04, "--learner-usd-per-h", 10, "--json")
    plan = echo2("plan", *PAPER, *asked).json
    assert (plan["question"], plan["saturated"], plan["step_s"]) == ("budget", False, pytest.approx(2560.0))
    assert plan["cost_usd_per_h"] == pytest.approx(12.04)
    assert plan["predicted_bubble_ratio"] == pytest.approx(1 - 1631.2 / 2560)


def test_a_pool_is_told_which_s_and_kappa_it_serves(echo2: Echo2) -> None:
    asked = ("plan", "--t-train", 10, "--t-bcast", 8, "--t-gen", 3, "--rollouts-per-step", 90)
    plan = echo2(*asked, "--pool-rate", 9, "--json").json
    assert (plan["staleness_budget"], plan["publish_period"], plan["cost_usd_per_h"]) == (4, 2, None)
    at = {(one["staleness_budget"], one["publish_period"]): one for one in plan["surveyed"]}
    assert (at[3, 2]["feasible"], at[3, 2]["step_s"]) == (False, pytest.approx(10.25))
    assert at[6, 5]["step_s"] == pytest.approx(10.2)
    short = echo2(*asked, "--pool-rate", 8)
    assert "with which the learner waits" in refused(short)
    assert "have workers for 9 trajectories/s" in refused(short)
    assert "11.1%" in short.out


def test_a_configuration_gives_s_kappa_r_gamma_and_the_learners_price(echo2: Echo2, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\npath = "/nowhere"\n[rollout]\nrollouts_per_step = 2048\ngroup_size = 16\n[staleness]\nbudget = 6\n'
        "publish_period = 3\n[provisioning]\ngamma = 1.5\nlearner_usd_per_h = 8.0\n"
    )
    asked = ("plan", path, "--t-train", 1631.2, "--t-bcast", 1310, "--offers", EXAMPLE, "--json")
    plan = echo2(*asked).json
    assert (plan["staleness_budget"], plan["publish_period"], plan["rollouts_per_step"]) == (6, 3, 2048)
    assert (plan["gamma"], plan["learner_usd_per_h"]) == (1.5, 8.0)
    plan = echo2(*asked, "--staleness", 4, "--publish-period", 2, "--gamma", 1, "--learner-usd-per-h", 9).json
    assert (plan["staleness_budget"], plan["publish_period"], plan["gamma"]) == (4, 2, 1)
    assert plan["learner_usd_per_h"] == 9
    path.write_text('[run]\nmode = "sync"\n[rollout]\nengine = "scripted"\n')
    assert 'must be for run.mode = "echo2", got "sync"' in refused(echo2(*asked))


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """A run's folder with two measured steps."""
    import msgspec

    folder = tmp_path / "ran"
    folder.mkdir()
    (folder / "config.toml").write_text(
        '[run]\nname = "ran"\n[rollout]\nengine = "scripted"\nrollouts_per_step = 90\ngroup_size = 9\n'
        "[workers]\nusd_per_h = 0.5\n"
    )
    fields = msgspec.structs.fields(StepMetrics)
    blank = {field.name: {} if "dict" in str(field.type) else 0 for field in fields if field.required}
    steps = [
        blank | {"step": k, "t_train_s": t, "t_bcast_s": 8.0, "mu_pool_per_s": 6.0, "workers_active": 3,
                 "publish_bytes": 2_000_000_000, "length_mean": 400.0}
        for k, t in enumerate((11.0, 10.0, 9.0))
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    events = [("lease", 50.0), ("submit", 53.0)]
    lines = [json.dumps({"kind": kind, "lease": "a", "wall_time": at}) for kind, at in events]
    (folder / "events.jsonl").write_text("\n".join([*lines, "torn"]))
    return folder


def test_a_run_is_planned_from_what_it_measured(echo2: Echo2, ran: Path, offers: Path) -> None:
    # two steps of 10 s less 8 + 3 s leave 9 s: 90 / 9 = 10/s, times 1.1 from workers of 2/s: six
    plan = echo2("plan", ran, "--json").json
    assert (plan["t_train_s"], plan["t_bcast_s"], plan["t_gen_s"]) == (10.0, 8.0, pytest.approx(3.0))
    assert plan["mu_min_overlapped_per_s"] == pytest.approx(10.0)
    assert (plan["selected"][0]["count"], plan["cost_usd_per_h"]) == (6, pytest.approx(3.0))
    assert not plan["estimated"]
    assert plan["origins"]["t_train_s"] == "measured in ran, median of 5 steps"
    shown = echo2("plan", ran).out
    assert "T_train measured in ran, median of 5 steps" in " ".join(shown.split())
    assert "2 GB to each worker" in shown
    assert "1.06 MB to each worker" in echo2("plan", ran, "--snapshot-gb", 0.001063).out

    given = echo2("plan", ran, "--t-train", 20, "--t-gen", 0, "--json").json
    assert (given["t_train_s"], given["t_bcast_s"], given["t_gen_s"]) == (20.0, 8.0, 0.0)
    # the run's workers were RTX 5090, say: 2/s each at the list's prices
    bought = echo2("plan", ran, "--offers", "prices", "--measured", "RTX5090", "--json").json
    assert {picked["gpu"] for picked in bought["selected"]} == {"RTX5090"}
    assert not bought["estimated"]


def test_a_run_without_prices_or_steps_says_what_it_needs(echo2: Echo2, ran: Path, offers: Path) -> None:
    config = (ran / "config.toml").read_text()
    (ran / "config.toml").write_text(config.replace("usd_per_h = 0.5", "usd_per_h = 0.0"))
    assert "workers of ran must have a price, and its workers.usd_per_h is 0: give --offers" in refused(
        echo2("plan", ran)
    )
    (ran / "metrics.jsonl").unlink()
    assert "--t-train, --t-bcast (or --snapshot-gb with --worker-mbps) are missing" in refused(
        echo2("plan", ran, "--offers", offers)
    )
    shutil.rmtree(ran)
    assert "there is no such file" in refused(echo2("plan", ran, "--offers", offers))


def test_without_offers_those_of_the_configurations_pools_are_taken(echo2: Echo2, ran: Path, offers: Path) -> None:
    config = ran / "config.toml"
    config.write_text(config.read_text() + f'[[pools]]\nkind = "local"\noffers = "{offers}"\n')
    times = ("--t-train", 600, "--t-bcast", 60)
    for source in (ran, config):
        plan = echo2("plan", source, *times, "--json").json
        assert [picked["name"] for picked in plan["selected"]] == ["5090"]
        assert plan["notes"][0] == "no --offers: those of the configuration's pools, offers.csv"
    other = ("--offers", "prices", "--measured", "RTX5090=0.2")
    assert "pools" not in " ".join(echo2("plan", config, *times, *other, "--json").json["notes"])


def test_figures_that_differ_from_the_offers_own_are_explained(echo2: Echo2, tmp_path: Path) -> None:
    # 16.4 GB every 2 steps of 1631.2 s are 18.1 GB an hour: 0.51 + 18.1 * 0.002 = 0.546; 0.2 * 0.98 = 0.196
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER},traffic_usd_per_gb,reliability\na,RTX5090,9,0.51,0.2,0.002,0.98\n")
    told = (
        "USD/h is rent and traffic: 18.1 GB/h reach each machine",
        "per s counts the share of the time that a machine is up (reliability)",
    )
    asked = ("plan", *PAPER, "--snapshot-gb", 16.4, "--offers", path)
    assert echo2(*asked, "--json").json["notes"][-2:] == list(told)
    shown = " ".join(echo2(*asked).out.split())
    assert all(words in shown for words in told)
    path.write_text(f"{HEADER}\na,RTX5090,9,0.51,0.2\n")
    assert not any(words in " ".join(echo2(*asked).out.split()) for words in told)


def test_too_small_a_market_is_told_what_is_required_of_it(echo2: Echo2, tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER}\na,RTX5090,2,0.51,0.2\n")
    refusal = echo2("plan", *PAPER, "--offers", path, "--json").json
    assert refusal["feasible"] is False
    assert refusal["mu_min_per_s"] == pytest.approx(2.0979, abs=1e-4)
    assert refusal["mu_min_overlapped_per_s"] == pytest.approx(1.2555, abs=1e-4)
    assert refusal["mu_target_per_s"] == pytest.approx(1.3811, abs=1e-4)


def test_a_slow_line_of_a_chosen_machine_is_remarked_on(echo2: Echo2, tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER},downlink_mbps\nslow,RTX5090,20,0.5,0.2,50\n")
    plan = echo2("plan", *PAPER, "--snapshot-gb", 16.4, "--offers", path)
    assert "slow takes 2624 s to download a publish, longer than T_bcast" in plan.out


def test_a_market_of_thousands_is_shown_in_a_few_lines(echo2: Echo2, tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER}\n" + "".join(f"host-{k},RTX5090,1,{0.4 + k / 1e5:.5f},0.002\n" for k in range(10_000)))
    done = echo2("plan", *PAPER, "--offers", path)
    assert "in 671 more offers" in done.out
    assert len(done.out.splitlines()) < 45


def test_long_names_are_folded_and_figures_are_not(echo2: Echo2, tmp_path: Path) -> None:
    path = tmp_path / "offers.csv"
    path.write_text(f"{HEADER}\nvast/16x-{'long-' * 20}name,RTX5090,900,1234.567,0.2\n")
    lines = echo2("plan", *PAPER, "--offers", path).out.splitlines()
    assert max(map(len, lines)) <= 80
    assert any("1234.567" in line and "8641.97" in line for line in lines)

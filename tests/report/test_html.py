from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from echo2.errors import UserError
from echo2.metrics import Mismatch, StepMetrics
from echo2.report.folder import read_run
from echo2.report.html import render_report, staleness_budget, visible, write_report
from echo2.transport.messages import RunStatus


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.names.append(tag)


def test_a_run_becomes_one_page_that_holds_everything(
    make_run: Callable[[int], Path], make_status: Callable[..., RunStatus]
) -> None:
    folder = make_run(30)
    path = write_report(folder, make_status())
    page = path.read_text(encoding="utf-8")
    elements = Elements()
    elements.feed(page)

    assert path == folder / "report.html"
    assert sorted(p.name for p in folder.iterdir() if "report" in p.name) == ["report.html"]
    assert elements.names.count("svg") == 20
    for word in (
        "Staleness histogram",
        "Bubble ratio",
        "T_bcast",
        "Pool rate",
        "Cost of a step",
        "Gradient norm",
        "Who carries snapshots",
    ):
        assert word in page
    # nothing that a model, a task, a worker or a configuration wrote became markup
    assert "script" not in elements.names
    assert "away" not in elements.names
    for escaped in ("demo &lt;i&gt;", "&lt;script&gt;alert", "integer answers &lt;b&gt;", "&lt;away&gt;"):
        assert escaped in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    # nothing is fetched: every link inside the page points into it
    assert not re.search(r'(?:href|src)="(?!#)', page.replace("xlink:href", "href"))
    assert "#0a0a" not in page  # every placeholder colour became a variable of the style sheet


def test_the_page_says_how_each_task_fares_and_who_was_set_aside(
    make_run: Callable[[int], Path], make_metrics: Callable[..., StepMetrics]
) -> None:
    folder = make_run(0)
    lines = [
        make_metrics(
            step,
            reward_by_task={"easy": step / 10, "game <b>": -2.0},
            rows_by_task={"easy": 1000, "game <b>": 4},
            pass_share_by_task={"easy": step / 10},
            rescored=40,
            rescored_differing=1,
            set_aside={"worker-7": "greedy <i>: it sent the reward 1"},
            audited={
                "worker-8": Mismatch(
                    name="ada <u>", groups=3, tokens=1000, mean_nats=0.0123, p99_nats=0.1, beyond_share=0.002
                )
            },
        )
        for step in range(10)
    ]
    (folder / "metrics.jsonl").write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    page = render_report(read_run(folder))
    assert "greedy &lt;i&gt;: it sent the reward 1" in page
    assert "Share of the rows judged for a step that pass, by task." in page
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    assert "easy 10,000 0.200 → 0.700 70.0% game &lt;b&gt; 40 -2.000 → -2.000 -" in text
    assert "Rewards scored again 40, of which 1 differ" in text
    assert "ada &lt;u&gt; 3 1,000 0.0123 0.1 0.20%" in text


def test_a_run_without_steps_has_a_page_that_says_so(make_run: Callable[[int], Path]) -> None:
    folder = make_run(0)
    assert "No training step has ended yet" in render_report(read_run(folder))


def test_how_snapshots_travelled_is_told_and_left_out_where_it_was_not_measured(
    make_run: Callable[[int], Path], make_metrics: Callable[..., StepMetrics]
) -> None:
    folder = make_run(12)
    page = render_report(read_run(folder))
    for told in ("2.1 MB, 1.10% of the elements changed", "92%", "2.00 s, no plan under 1.50 s", "24.0 MB"):
        assert told in page
    unmeasured = {
        "publish_bytes": 0, "delta_share": None, "seed_sent_bytes": 0, "sent_bytes_by_node": {}, "reparentings": 0,
        "t_bcast_predicted_s": None, "t_bcast_bound_s": None,
    }  # fmt: skip
    line = msgspec.json.encode(make_metrics(0, **unmeasured))
    (folder / "metrics.jsonl").write_bytes(line + b"\n")
    page = render_report(read_run(folder))
    for absent in ("sent as", "Size of a publish", "Who carries snapshots", "relay"):
        assert absent not in page


def test_the_page_says_what_each_machine_and_each_step_cost(
    make_run: Callable[[int], Path], make_metrics: Callable[..., StepMetrics]
) -> None:
    folder = make_run(1)
    costs = {"learner": 3.0, "vast-2": 0.5, "vast-1": 1.0, **{f"gone-{k:02d}": 0.01 for k in range(40)}}
    line = make_metrics(1, cost_usd=6.0, step_cost_usd=0.25, cost_usd_by_name=costs)
    (folder / "metrics.jsonl").write_bytes(msgspec.json.encode(line) + b"\n")
    page = re.sub(r"<[^>]*>", " ", render_report(read_run(folder)))
    told = re.findall(
        r"(learner|vast-[12]|13 others|before the coordinator last started)\s+(\$[\d.]+)\s+([\d.]+%)", page
    )
    assert told == [
        ("learner", "$3.00", "50.0%"),
        ("vast-1", "$1.00", "16.7%"),
        ("vast-2", "$0.50", "8.3%"),
        ("13 others", "$0.13", "2.2%"),
        ("before the coordinator last started", "$1.10", "18.3%"),
    ]
    assert "Cost of a step, mean" in page


def test_the_page_says_which_machines_came_and_went_and_why(make_run: Callable[[int], Path]) -> None:
    folder = make_run(1)
    decided = [
        {"kind": "provisioning_activate", "offer": "vast", "machines": 2, "usd_per_h": 0.5, "reason": "short <b>"},
        {"kind": "provisioning_keep", "reason": "nothing to do"},
        {"kind": "provisioning_release", "machine_id": "vast-1", "offer": "vast", "reason": "more than enough"},
        {"kind": "machine_gone", "machine": "vast-2", "pool": "skypilot", "phase": "lost", "detail": "preempted"},
        {"kind": "machine_may_still_cost", "machine": "vast-2", "pool": "skypilot", "tries": 5},
        *({"kind": "lease", "lease": str(k)} for k in range(300)),
    ]
    text = "".join(msgspec.json.encode({"wall_time": 1.79e9, **event}).decode() + "\n" for event in decided)
    (folder / "events.jsonl").write_text(text)
    page = render_report(read_run(folder))
    for told in (
        "activates 2 of vast at 0.5 USD/h", "short &lt;b&gt;", "releases vast-1", "more than enough",
        "vast-2 of skypilot: lost", "preempted",
        "could not stop vast-2 of skypilot: it may still cost",
    ):  # fmt: skip
        assert told in page
    assert "nothing to do" not in page


def test_a_torn_line_is_counted_and_left_out(make_run: Callable[[int], Path]) -> None:
    folder = make_run(3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 3, "rew')
    run = read_run(folder)
    assert ([m.step for m in run.metrics], run.unreadable_lines) == ([0, 1, 2], 1)


def test_a_statistic_that_was_not_a_number_is_left_out(
    make_run: Callable[[int], Path], make_metrics: Callable[..., object]
) -> None:
    folder = make_run(1)
    line = msgspec.json.encode(make_metrics(1, learner={"kl": float("nan"), "loss": 0.5}))
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(line + b"\n")
    assert read_run(folder).metrics[-1].learner == {"loss": 0.5}


def test_after_a_rollback_the_newest_line_of_a_step_stands(
    make_run: Callable[[int], Path], make_metrics: Callable[..., object]
) -> None:
    folder = make_run(3)
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(make_metrics(1, policy_incarnation=1)) + b"\n")
    assert [(m.step, m.policy_incarnation) for m in read_run(folder).metrics] == [(0, 0), (1, 1), (2, 0)]


def test_a_long_run_shows_transcripts_from_first_to_last(make_run: Callable[[int], Path]) -> None:
    run = read_run(make_run(60))
    assert run.transcripts_total == 60
    assert (len(run.transcripts), run.transcripts[0].step, run.transcripts[-1].step) == (24, 0, 59)


def test_an_evaluation_that_scored_nothing_has_no_reward(make_run: Callable[[int], Path]) -> None:
    folder = make_run(1)
    (folder / "evals.jsonl").write_text('{"version": 0, "reward_mean": null, "prompts": 0, "reward_stderr": null}\n')
    assert [line.reward_mean for line in read_run(folder).evals] == [None]


def test_a_folder_that_is_no_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a run folder must hold config\.toml, got "):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("config", "budget"),
    [
        ({"run": {"mode": "echo2"}, "staleness": {"budget": 4}}, 4),
        ({"run": {"mode": "sync"}, "staleness": {"budget": 4}}, 0),
        ({"run": {"mode": "async"}}, 1),
        ({}, None),
    ],
)
def test_the_budget_of_the_mode_is_drawn(config: dict[str, object], budget: int | None) -> None:
    assert staleness_budget(config) == budget


def test_controls_are_shown_and_joiners_kept() -> None:
    assert visible("a\x00b\u202ec\n\td\u200de") == "a\ufffdb\ufffdc\n\td\u200de"

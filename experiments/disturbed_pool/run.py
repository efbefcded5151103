"""A pool whose machines are slowed, killed and added to: how fast the controller brings it back to the target.

``python experiments/disturbed_pool/run.py`` runs real processes on this machine for about ten minutes and writes
``results.json`` and ``pool.svg`` beside this file. Nothing needs a model: learner and engine only take time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from echo2.config.load import load_config
from echo2.config.root import Config
from echo2.metrics import StepMetrics
from echo2.run.api import Run

HERE = Path(__file__).parent
RUNS_S, STOPS_S = 0.25, 1.0
"""A slowed worker's process runs and stands still by turns."""
SLOWED = 0.25
"""What it gets done so, about."""
SETTLED_S = 120.0
"""From the start, or from a disturbance, until the pool must have settled."""
PHASES = ("start", "two are slowed", "two are killed", "two are added")


class Victims(NamedTuple):
    slowed: tuple[str, ...]
    killed: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE, help="folder for results.json and pool.svg")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as runs:
        config = load_config(HERE / "config.toml", [f"run.dir={runs}"])
        began, ended, victims, lines, events = disturbed(config)
    result = judged(config, began, ended, lines, events, capacity(config, began, victims, events))
    (out / "results.json").write_text(json.dumps(result, indent=1) + "\n")
    draw(config, began, ended, lines, out / "pool.svg")
    print(json.dumps({phase["phase"]: phase for phase in result["phases"]}, indent=1))


# ---- what happens ----------------------------------------------------------------------------------------------------


def disturbed(config: Config) -> tuple[list[float], float, Victims, Sequence[StepMetrics], list[dict[str, Any]]]:
    """When each phase began, when the last one ended, who was disturbed, and what the run wrote."""
    with Run(config) as run:
        following = threading.Thread(target=lambda: list(run), daemon=True)
        following.start()
        wait_for(lambda: len(run.metrics) > 0, 60.0)
        began = [time.time()]
        time.sleep(SETTLED_S + 20)
        there = workers(run)
        victims = Victims(tuple(sorted(there)[:2]), tuple(sorted(there)[2:4]))
        began.append(time.time())
        with slowed([there[name] for name in victims.slowed]):
            time.sleep(SETTLED_S)
            began.append(time.time())
            for name in victims.killed:
                os.kill(there[name], signal.SIGKILL)
            time.sleep(SETTLED_S)
            began.append(time.time())
            with joined(run, 2):
                time.sleep(SETTLED_S)
                ended = time.time()
                run.stop("the experiment is over")
                run.result()
        events = [json.loads(line) for line in (run.folder.root / "events.jsonl").read_text().splitlines()]
    return began, ended, victims, run.metrics, events


def workers(run: Run) -> dict[str, int]:
    """Process ids of the pool's workers, by machine."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if "worker" in words and "--name" in words and str(run.folder.root) in " ".join(words):
            found[words[words.index("--name") + 1]] = int(path.parent.name)
    return found


@contextmanager
def slowed(pids: Sequence[int]) -> Iterator[None]:
    over = threading.Event()

    def hinder(pid: int) -> None:
        try:
            while not over.wait(RUNS_S):
                os.kill(pid, signal.SIGSTOP)
                over.wait(STOPS_S)
                os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return  # It was released.

    threads = [threading.Thread(target=hinder, args=(pid,), daemon=True) for pid in pids]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def joined(run: Run, count: int) -> Iterator[None]:
    """Workers that join by themselves and cost nothing."""
    join = run.folder.join("worker").read_text().strip()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "echo2", "worker", join, "--usd-per-h", "0"]
        started = [
            subprocess.Popen(
                [*command, "--name", f"added-{n}", "--dir", f"{folder}/{n}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for n in range(count)
        ]
        try:
            yield
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait(60.0)


def wait_for(condition: Any, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing happened within {limit_s:g} s")
        time.sleep(0.1)


# ---- what came of it -------------------------------------------------------------------------------------------------


def capacity(
    config: Config, began: Sequence[float], victims: Victims, events: list[dict[str, Any]]
) -> list[tuple[float, float]]:
    """(wall time, trajectories/s from then on) of the pool as it really was, by who was there and at what pace."""
    pace = config.rehearsal
    full_per_s = config.rollout.group_size / (pace.group_s * math.exp(pace.group_spread**2 / 2))
    changes: list[tuple[float, float]] = [(began[1], (SLOWED - 1) * full_per_s)] * len(victims.slowed)
    changes += [(began[2], -full_per_s)] * len(victims.killed)
    name_of = {event["worker"]: event["name"] for event in events if event["kind"] == "worker_joined"}
    for event in events:
        if event["kind"] == "worker_joined":
            changes.append((event["wall_time"], full_per_s))
        elif event["kind"] == "worker_left" and name_of.get(event["worker"]) not in victims.killed:
            was = SLOWED if name_of.get(event["worker"]) in victims.slowed else 1.0
            changes.append((event["wall_time"], -was * full_per_s))
    changes.sort()
    return list(zip((at_s for at_s, _ in changes), accumulate(change for _, change in changes), strict=True))


def judged(
    config: Config,
    began: Sequence[float],
    ended: float,
    lines: Sequence[StepMetrics],
    events: list[dict[str, Any]],
    truth: list[tuple[float, float]],
) -> dict[str, Any]:
    period_s = config.provisioning.period_s
    target_per_s = config.provisioning.gamma * config.rollout.rollouts_per_step / config.rehearsal.train_s
    phases = []
    for phase, (start_s, end_s) in zip(PHASES, pairwise([*began, ended]), strict=True):
        inside = [event for event in events if start_s <= event["wall_time"] < end_s]
        decisions = [event for event in inside if event["kind"] in ("provisioning_activate", "provisioning_release")]
        known = [(m.wall_time, m.mu_pool_per_s - (m.mu_target_per_s or math.inf)) for m in lines]
        really = [(at_s, rate - target_per_s) for at_s, rate in truth]
        settled_s = start_s + SETTLED_S / 2
        phases.append(
            {
                "phase": phase,
                "periods_below_target": periods_below(really, start_s, end_s, period_s),
                "periods_estimated_below_target": periods_below(known, start_s, end_s, period_s),
                "bubble_ratio_settled": round(bubble(lines, settled_s, end_s), 4),
                "usd_per_h_at_end": next((m.usd_per_h for m in reversed(lines) if m.wall_time < end_s), None),
                "decisions": [
                    {
                        "after_s": round(event["wall_time"] - start_s, 1),
                        "kind": event["kind"].removeprefix("provisioning_"),
                        "machines": event.get("machine_ids") or event.get("machine_id"),
                        "reason": event["reason"],
                    }
                    for event in decisions
                ],
            }
        )
    whole = bubble(lines, began[0] + SETTLED_S, ended)
    return {"period_s": period_s, "phases": phases, "bubble_ratio_with_disturbances": round(whole, 4)}


def periods_below(
    margins: Sequence[tuple[float, float]], start_s: float, end_s: float, period_s: float
) -> float | None:
    """Decision periods from the disturbance until the margin was positive for good; None where it never was."""
    before = [margin for at_s, margin in margins if at_s <= start_s]
    inside = [(start_s, before[-1] if before else -math.inf)]
    inside += [(at_s, margin) for at_s, margin in margins if start_s < at_s < end_s]
    if inside[-1][1] < 0:
        return None
    below = [place for place, (_, margin) in enumerate(inside) if margin < 0]
    return round((inside[below[-1] + 1][0] - start_s) / period_s, 2) if below else 0.0


def bubble(lines: Sequence[StepMetrics], start_s: float, end_s: float) -> float:
    inside = [m for m in lines if start_s <= m.wall_time < end_s]
    idle_s, train_s = sum(m.idle_s for m in inside), sum(m.t_train_s for m in inside)
    return idle_s / (idle_s + train_s) if inside else float("nan")


def draw(config: Config, began: Sequence[float], ended: float, lines: Sequence[StepMetrics], path: Path) -> None:
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots()
    shown = [m for m in lines if m.wall_time < ended]
    at_s = [m.wall_time - began[0] for m in shown]
    axes.plot(at_s, [m.mu_pool_per_s for m in shown], label="pool, as estimated")
    axes.plot(at_s, [m.mu_target_per_s or float("nan") for m in shown], linestyle="--", label="target")
    axes.bar(at_s, [m.idle_s for m in shown], width=3, color="tab:red", alpha=0.5, label="learner idle, s per step")
    for phase, start_s in zip(PHASES, began, strict=True):
        axes.axvline(start_s - began[0], color="0.7", linewidth=0.8)
        axes.annotate(phase, (start_s - began[0] + 2, 0.97), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_xlabel(f"seconds; a decision period is {config.provisioning.period_s:g} s")
    axes.set_ylabel("trajectories/s")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path)


if __name__ == "__main__":
    main()

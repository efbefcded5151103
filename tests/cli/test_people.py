from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo2.transport.messages import RunStatus
from echo2.types import Policy

from .conftest import Echo2


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "r"\nsteps = 9\n[rollout]\nengine = "scripted"\n')
    return folder


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("command", ["status", "stop", "worker"])
def test_a_join_string_is_needed(echo2: Echo2, command: str) -> None:
    done = echo2(command)

    assert done.code == 2
    assert "a join string is needed" in done.faults[0]


@pytest.mark.parametrize("command", ["status", "stop", "worker"])
def test_a_malformed_join_string_is_refused_without_being_repeated(echo2: Echo2, command: str) -> None:
    done = echo2(command, "echo2://sesame@nowhere")

    assert done.code == 2
    assert len(done.faults) == 1
    assert "sesame" not in done.err


def test_a_coordinator_that_does_not_answer_is_no_mistake_of_the_user(
    echo2: Echo2, closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ECHO2_JOIN", f"echo2://sesame@127.0.0.1:{closed_port}?tls=0")

    done = echo2("status", "--json")

    assert (done.code, done.out) == (1, "")
    assert str(closed_port) in done.faults[0]
    assert "sesame" not in done.err


def test_the_status_of_a_run_that_is_over_comes_from_its_folder(echo2: Echo2, run_folder: Path) -> None:
    done = echo2("status", run_folder, "--json")

    assert done.code == 0, done.err
    assert (done.json["name"], done.json["phase"], done.json["steps"]) == ("r", "not running", 9)
    assert "r: not running, step 0 of 9" in echo2("status", run_folder).out


def test_a_run_that_is_not_running_cannot_be_stopped(echo2: Echo2, run_folder: Path) -> None:
    done = echo2("stop", run_folder)

    assert done.code == 1
    assert done.faults[0].startswith(f"the run in {run_folder} is not running, so there is nothing to stop")


def test_a_folder_that_is_no_run_is_refused(echo2: Echo2, tmp_path: Path) -> None:
    done = echo2("status", tmp_path)

    assert done.code == 2
    assert "must be a run folder" in done.faults[0]


def test_watching_and_json_exclude_each_other(echo2: Echo2, run_folder: Path) -> None:
    assert echo2("status", run_folder, "--watch", "--json").code == 2


WORKER = {"active": True, "installed": "0.4", "state": "generating", "rows": 640, "rate_per_s": 5.2, "usd_per_h": 0.4}
RELAYS: dict[str, dict[str, Any]] = {
    "near": {"reachable": True, "sent_bytes": 1_234_500_000, "reparentings": 2, "fed_by": "seed"},
    "behind-nat": {"reachable": False, "sent_bytes": 0, "reparentings": 1, "fed_by": "near"},
    "fresh": {"reachable": None, "sent_bytes": 0, "reparentings": 0},
    "of-an-older-coordinator": {},
}


@pytest.fixture
def picture(monkeypatch: pytest.MonkeyPatch) -> RunStatus:
    """What the coordinator answers, at a terminal of the usual width."""
    rows = tuple({"id": name, "name": name, **WORKER, **relay} for name, relay in RELAYS.items())
    seen = RunStatus("run", "demo", "training", 3, 9, Policy(0, 2), {}, {"generated": 4}, rows)
    monkeypatch.setattr("echo2.cli.people._picture", lambda target: seen)
    monkeypatch.setenv("COLUMNS", "80")
    return seen


def test_status_shows_who_feeds_each_worker_whether_it_can_be_dialled_and_what_it_sent_on(
    echo2: Echo2, picture: RunStatus
) -> None:
    lines = echo2("status").out.splitlines()
    relays = next(k for k, line in enumerate(lines) if line.split()[:2] == ["relay", "of"])
    assert not any("…" in line for line in lines), "nothing is cut at eighty columns"
    assert {tuple(line.split()) for line in lines[relays + 1 :] if line.strip()} == {
        ("near", "coordinator", "yes", "1,234.5", "MB", "2"),
        ("behind-nat", "near", "no", "0.0", "MB", "1"),
        ("fresh", "-", "unknown", "0.0", "MB", "0"),
        ("of-an-older-coordinator", "-", "unknown", "0.0", "MB", "0"),
    }


def test_long_names_of_workers_are_folded_and_figures_are_not(echo2: Echo2, picture: RunStatus) -> None:
    row = picture.workers[0]
    row.update(name="worker-on-a-rented-machine-" + "x" * 60, rows=12_345_678, usd_per_h=12.5, cost_usd=1234.5)
    lines = echo2("status").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)
    assert any({"12345678", "12.50", "1,234.50"} <= set(line.split()) for line in lines)


def test_status_says_who_was_set_aside_and_how_each_task_fares(
    echo2: Echo2, picture: RunStatus, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = {
        "reward_mean": 0.5, "staleness_mean": 1.0, "staleness_max": 2, "bubble_ratio": 0.1, "cost_usd": 0.0,
        "reward_by_task": {"easy": 0.75, "game": -1.5}, "rows_by_task": {"easy": 8, "game": 4},
        "pass_share_by_task": {"easy": 0.75}, "audited": {"a": {"mean_nats": 0.0123}, "b": {"mean_nats": 0.002}},
    }  # fmt: skip
    outcast = {"id": "worker-7", "name": "greedy", "reason": "it sent the reward 1 for a reply that scores 0 here"}
    seen = msgspec.structs.replace(
        picture, last_metrics=last, set_aside=(outcast,), rescored={"checked": 20, "differing": 1, "failed": 0}
    )
    monkeypatch.setattr("echo2.cli.people._picture", lambda target: seen)
    told = " ".join(echo2("status").out.split())
    assert "set aside: greedy: it sent the reward 1 for a reply that scores 0 here" in told
    assert "20 rewards scored again, 1 differ, log-probs within 0.012 nats a token" in told
    assert "easy: reward 0.750, 75% pass, 8 rows game: reward -1.500, 4 rows" in told


def test_status_as_json_holds_the_relays_numbers(echo2: Echo2, picture: RunStatus) -> None:
    rows = {row["id"]: row for row in echo2("status", "--json").json["workers"]}
    for name, relay in RELAYS.items():
        assert relay.items() <= rows[name].items()


def test_status_says_what_the_coordinator_and_the_workers_sent(echo2: Echo2, picture: RunStatus) -> None:
    assert "sent" not in echo2("status").out.splitlines()[1]
    picture.last_metrics.update(
        reward_mean=0.5, staleness_mean=1.0, staleness_max=2, bubble_ratio=0.1, cost_usd=0.2,
        seed_sent_bytes=52_000_000, sent_bytes_by_node={"near": 20_000_000, "fresh": 6_000_000},
    )  # fmt: skip
    shown = " ".join(echo2("status").out.split())
    assert "sent 52.0 MB by the coordinator, 26.0 MB by workers" in shown

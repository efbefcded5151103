from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from echo2.errors import Echo2Error, TransportError, UserError
from echo2.run import child, launch
from echo2.run.child import Child, ChildSpec, Ending, environment
from echo2.run.folder import RunFolder
from echo2.run.launch import Launch, RunEnded, RunSpecs

PROGRAM = (sys.executable, str(Path(__file__).with_name("programs.py")))


class Silent:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def emit(self, kind: str, **fields: object) -> None:
        self.kinds.append(kind)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "RESTART_FIRST_S", 0.01)
    monkeypatch.setattr(child, "LAST_PATIENCE_S", 0.2)
    monkeypatch.setattr(launch, "TERM_LIMIT_S", 0.5)
    monkeypatch.setattr(launch, "LEAVE_LIMIT_S", 2.0)
    monkeypatch.setattr(launch, "POLL_S", 0.01)


def spec(root: Path, name: str, *, restartable: bool = True) -> ChildSpec:
    return ChildSpec(name, (str(root), name), root / f"{name}.log", program=PROGRAM, restartable=restartable)


def make(root: Path, plans: Mapping[str, str]) -> tuple[Launch, Silent]:
    for name, plan in plans.items():
        (root / f"plan-{name}").write_text(plan)
    workers = tuple(spec(root, name) for name in plans if name.startswith("w"))
    specs = RunSpecs(spec(root, "coordinator", restartable=False), spec(root, "learner"), workers)
    events = Silent()

    async def tell(reason: str) -> None:
        (root / "stop").touch()

    return Launch(specs, RunFolder(root), events, tell), events


def lives(root: Path, name: str) -> list[int]:
    path = root / f"lives-{name}"
    return [int(pid) for pid in path.read_text().split()] if path.exists() else []


def nobody_lives(root: Path) -> bool:
    deadline = time.monotonic() + 5
    pids = [pid for path in root.glob("lives-*") for pid in map(int, path.read_text().split())]
    while time.monotonic() < deadline:
        if not any(_is_running(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def stop_once_running(running: Launch, root: Path, count: int) -> None:
    while len(list(root.glob("lives-*"))) < count:
        await asyncio.sleep(0.01)
    running.stop("enough")


async def test_the_run_ends_when_the_coordinator_leaves_and_nobody_stays(tmp_path: Path) -> None:
    running, _ = make(tmp_path, {"coordinator": "until-stop", "learner": "until-stop", "w0": "until-stop"})
    async with asyncio.TaskGroup() as group:
        ended = group.create_task(running.run())
        group.create_task(stop_once_running(running, tmp_path, 3))
    assert ended.result() == RunEnded("enough")
    assert nobody_lives(tmp_path)


async def test_a_killed_program_is_started_again_and_an_own_exit_is_respected(tmp_path: Path) -> None:
    plans = {
        "coordinator": "killed until-stop",
        "learner": "killed killed until-stop",
        "w0": "crash until-stop",
        "w1": "leave",
    }
    running, _ = make(tmp_path, plans)

    async def stop_later() -> None:
        while [len(lives(tmp_path, name)) for name in plans] != [2, 3, 2, 1]:
            await asyncio.sleep(0.01)
        running.stop("seen")

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(running.run())
        group.create_task(stop_later())
    assert nobody_lives(tmp_path)


async def test_a_users_mistake_found_by_a_program_is_passed_through_at_once(tmp_path: Path) -> None:
    running, _ = make(tmp_path, {"coordinator": "hang", "learner": "user-error", "w0": "hang"})
    with pytest.raises(UserError, match=r"^learning\.lr must be more than 0, got 0$"):
        await running.run()
    assert len(lives(tmp_path, "learner")) == 1
    assert nobody_lives(tmp_path)


async def test_a_crash_loop_ends_the_run_with_the_last_words_of_the_log(tmp_path: Path) -> None:
    running, _ = make(tmp_path, {"coordinator": "hang", "learner": "crash", "w0": "hang"})
    with pytest.raises(Echo2Error, match="learner ended: the disk is gone") as caught:
        await running.run()
    assert not isinstance(caught.value, UserError)
    assert len(lives(tmp_path, "learner")) == child.CRASHES_ALLOWED
    assert nobody_lives(tmp_path)


async def test_the_coordinators_verdict_on_the_run_is_not_tried_again(tmp_path: Path) -> None:
    running, _ = make(tmp_path, {"coordinator": "crash", "learner": "hang"})
    with pytest.raises(Echo2Error, match="coordinator ended"):
        await running.run()
    assert len(lives(tmp_path, "coordinator")) == 1


async def test_one_lost_worker_is_given_up_all_lost_workers_end_the_run(tmp_path: Path) -> None:
    """Field report D07."""
    running, events = make(tmp_path, {"coordinator": "hang", "learner": "hang", "w0": "crash", "w1": "crash"})
    with pytest.raises(Echo2Error, match=r"w\d ended: the disk is gone"):
        await running.run()
    assert events.kinds.count("program_ended") == 2
    assert nobody_lives(tmp_path)


async def test_a_deaf_program_is_made_to_leave(tmp_path: Path) -> None:
    running, _ = make(tmp_path, {"coordinator": "until-stop", "learner": "deaf", "w0": "deaf"})
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(running.run())
        group.create_task(stop_once_running(running, tmp_path, 3))
    assert nobody_lives(tmp_path)


async def test_asking_twice_does_not_wait_for_order(tmp_path: Path) -> None:
    running, _ = make(tmp_path, {"coordinator": "hang", "learner": "hang", "w0": "hang"})

    async def twice() -> None:
        await stop_once_running(running, tmp_path, 3)
        await asyncio.sleep(0.05)
        running.stop("now")

    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        ended = group.create_task(running.run())
        group.create_task(twice())
    assert ended.result() == RunEnded("enough")
    assert nobody_lives(tmp_path)


async def test_a_wish_to_stop_that_nobody_hears_still_ends_the_run(tmp_path: Path) -> None:
    running, events = make(tmp_path, {"coordinator": "hang", "learner": "hang"})

    async def deaf(reason: str) -> None:
        raise TransportError("no route")

    running._tell_stop = deaf
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(running.run())
        group.create_task(stop_once_running(running, tmp_path, 2))
    assert "stop_unheard" in events.kinds
    assert nobody_lives(tmp_path)


async def test_a_child_that_ran_well_for_long_may_crash_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "HEALTHY_S", 0.0)
    (tmp_path / "plan-w0").write_text("crash " * 8 + "leave")
    events = Silent()
    assert await Child(spec(tmp_path, "w0"), events).run() is Ending.LEFT
    assert len(lives(tmp_path, "w0")) == 9
    assert events.kinds == ["program_restarted"] * 8


def test_children_know_their_share_of_the_cpu_and_their_life_line() -> None:
    made = environment({"PATH": "/bin"}, threads=2)
    assert (made["OMP_NUM_THREADS"], made["ECHO2_LIFELINE"], made["PATH"]) == ("2", "1", "/bin")
    assert "OMP_NUM_THREADS" not in environment({}, threads=0)

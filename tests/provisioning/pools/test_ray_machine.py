"""The actor's own part, without Ray, around a stand-in worker."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from echo2.provisioning.pools import ray_machine
from echo2.provisioning.pools.ray_machine import RayMachine
from echo2.provisioning.pools.ray_messages import Duty

pytestmark = pytest.mark.integration

WORKER = Path(__file__).parents[2] / "support" / "stand_in_worker.py"
LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def no_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_machine, "LAST_WORD_S", 0.0)
    monkeypatch.setattr(ray_machine, "NODE_LOOK_S", 0.02)


class Machine:
    def __init__(
        self, folder: Path, join: str = "leaves on SIGTERM", program: tuple[str, ...] = (str(WORKER),)
    ) -> None:
        self.left = threading.Event()
        self.log = folder / "m-1" / "worker.log"
        duty = Duty(
            machine_id="m-1", offer="m", usd_per_h=2.5, join=join, program=(str(WORKER),), folder=str(folder),
        )  # fmt: skip
        assert join not in repr(duty)
        self.actor = RayMachine(duty, lambda: "node-1", self.left.set)

    async def running(self) -> int:
        """The worker's process id."""
        await until(lambda: self.log.exists() and "pid " in self.log.read_text())
        return int(self.log.read_text().split()[1])

    async def leaves(self) -> None:
        await until(self.left.is_set)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():
            await asyncio.sleep(0.02)


async def test_it_starts_its_worker_with_name_folder_and_join_string_and_says_what_it_is(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    pid = await machine.running()
    assert machine.log.read_text() == f"pid {pid} name m-1 join leaves on SIGTERM\n"
    about = await machine.actor.about()
    assert (about.usd_per_h, about.node_id) == (2.5, "node-1")
    assert 0 < about.age_s < LIMIT_S
    assert b"leaves on SIGTERM" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    assert not machine.left.is_set()
    await machine.actor.stop(LIMIT_S)


async def test_stopped_it_lets_the_worker_leave_and_removes_all_but_its_log(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    await machine.running()
    assert (tmp_path / "m-1" / "snapshots").is_dir()
    await machine.actor.stop(LIMIT_S)
    assert machine.log.read_text().endswith("left in order\n")
    assert os.listdir(tmp_path / "m-1") == ["worker.log"]
    assert (await machine.actor.ended()).why == "its worker ended with exit code 0: left in order"
    await machine.leaves()


async def test_a_worker_that_does_not_leave_is_made_to(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "is deaf")
    await machine.running()
    await machine.actor.stop(0.05)
    assert (await machine.actor.ended()).why == "its worker was ended by signal 9"
    await machine.actor.stop(LIMIT_S)  # again is no error
    await machine.leaves()


async def test_it_notices_the_end_of_its_worker_and_leaves_whether_or_not_anybody_asked(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    os.kill(await machine.running(), signal.SIGKILL)
    await machine.leaves()
    ended = await machine.actor.ended()
    assert (ended.never_worked, ended.why) == (False, "its worker was ended by signal 9")


@pytest.mark.parametrize(("join", "told"), [("leaves on SIGTERM", "exit code 0"), ("is deaf", "signal 9")])
async def test_when_its_node_is_gone_the_worker_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, join: str, told: str
) -> None:
    monkeypatch.setattr(ray_machine, "NODE_LEAVE_S", 0.1 if join == "is deaf" else LIMIT_S)
    machine = Machine(tmp_path, join)
    await machine.running()
    monkeypatch.setattr(ray_machine.os, "getppid", lambda: 1)
    assert told in (await machine.actor.ended()).why
    await machine.leaves()


@pytest.mark.parametrize(("code", "never_worked"), [(1, False), (2, True)])
async def test_it_says_what_the_worker_ended_with(tmp_path: Path, code: int, never_worked: bool) -> None:
    machine = Machine(tmp_path, f"ends with {code}: the join string is used up")
    ended = await machine.actor.ended()
    assert ended.never_worked is never_worked
    assert ended.why == f"its worker ended with exit code {code}: the join string is used up"


async def test_a_worker_that_cannot_be_started_is_told_and_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "m-1").write_text("a file where a folder must be")
    machine = Machine(tmp_path)
    ended = await machine.actor.ended()
    assert ended.never_worked
    assert ended.why.startswith("its worker could not be started: ")
    await machine.actor.stop(LIMIT_S)
    await machine.leaves()

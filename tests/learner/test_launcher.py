from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from echo2.errors import Echo2Error, UserError
from echo2.learner import launcher
from echo2.learner.launcher import RankProcesses, environments

pytestmark = pytest.mark.integration


def ranks(tmp_path: Path, *texts: str) -> RankProcesses:
    """Ranks that run these lines of Python each."""
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.py").write_text(f"import os, signal, sys, time\n{text}\n")
    main = f"import os, runpy; runpy.run_path({str(tmp_path)!r} + '/' + os.environ['RANK'] + '.py')"
    return RankProcesses((sys.executable, "-c", main), len(texts), threads=1)


LINGER = "time.sleep(50)"


async def test_ranks_that_leave_in_order_are_a_success(tmp_path: Path) -> None:
    assert await ranks(tmp_path, "", "print('bye')").run() == 0


async def test_the_exit_code_of_rank_0_is_the_learners_and_ends_the_others(tmp_path: Path) -> None:
    async with asyncio.timeout(30):
        assert await ranks(tmp_path, "sys.exit(2)", LINGER).run() == 2


async def test_a_mistake_that_another_rank_found_is_told_as_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^learning\.device must exist$"):
        await ranks(tmp_path, LINGER, "print('echo2: learning.device must exist'); sys.exit(2)").run()


async def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    with pytest.raises(Echo2Error, match="rank 1 of the learner ended: killed by signal 9"):
        await ranks(tmp_path, LINGER, "os.kill(os.getpid(), signal.SIGKILL)").run()


async def test_a_rank_that_does_not_hear_the_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LEAVE_LIMIT_S", 0.1)
    async with asyncio.timeout(30):
        assert await ranks(tmp_path, "", LINGER).run() == 0


async def test_a_stop_reaches_rank_0_which_tells_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LEAVE_LIMIT_S", 0.1)
    told = tmp_path / "started"
    text = f"signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); open({str(told)!r}, 'w'); {LINGER}"
    group = ranks(tmp_path, text, LINGER)
    running = asyncio.ensure_future(group.run())
    async with asyncio.timeout(30):
        while not told.exists():
            await asyncio.sleep(0.02)
        group.stop("enough")
        assert await running == 0


def test_each_rank_is_told_who_it_is_and_where_the_others_are() -> None:
    first, second = environments(2, threads=3)
    assert (first["RANK"], second["RANK"], second["LOCAL_RANK"]) == ("0", "1", "1")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]
    assert (first["WORLD_SIZE"], first["MASTER_ADDR"], first["OMP_NUM_THREADS"]) == ("2", "127.0.0.1", "3")

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from echo2.errors import Refused
from echo2.provisioning.observation import Phase
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.local import LocalPool, Program
from echo2.shell import SystemClock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals")

OFFER = Offer(name="here", gpu="cpu", count=3, usd_per_h=0.5, rollouts_per_s=1.0, min_rental_h=2.0)
WORKER = """
import os, pathlib, signal, sys
place = pathlib.Path(sys.argv[1])
(place / os.environ["ECHO2_JOIN"]).write_text(str(os.getpid()))
signal.signal(signal.SIGTERM, lambda *_: (place.joinpath("drained").touch(), sys.exit(0)))
sys.stdin.read()
"""
"""Says that it is there, ends in order when asked, and when its life line closes."""


async def invite(machine_id: str) -> str:
    return f"join-{machine_id}"


def pool(place: Path, code: str = WORKER, ask: Callable[[str], Awaitable[str]] = invite) -> LocalPool:
    def program(machine_id: str, join: str) -> Program:
        command = (sys.executable, "-c", code, str(place))
        return Program(command, {**os.environ, "ECHO2_JOIN": join}, place / f"{machine_id}.log")

    return LocalPool([OFFER], ask, program, SystemClock())


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20.0):
        while not holds():
            await asyncio.sleep(0.01)


async def test_a_machine_is_a_process_with_its_own_join_string(tmp_path: Path) -> None:
    made = pool(tmp_path)
    handle = await made.start("here-1", "here")
    await until((tmp_path / "join-here-1").exists)
    assert (handle.offer, handle.usd_per_h, handle.phase) == ("here", 0.5, Phase.ACTIVE)
    assert handle.paid_until_s > SystemClock().monotonic() + 7000
    assert [listing.offer for listing in await made.listings()] == [OFFER]
    await made.stop("here-1")
    assert (tmp_path / "drained").exists()
    assert await made.machines() == []


async def test_an_id_that_is_started_twice_is_one_process(tmp_path: Path) -> None:
    made = pool(tmp_path)
    await made.start("here-1", "here")
    await until((tmp_path / "join-here-1").exists)
    pid = (tmp_path / "join-here-1").read_text()
    await made.start("here-1", "here")
    assert (tmp_path / "join-here-1").read_text() == pid
    assert len(await made.machines()) == 1
    await made.stop("here-1")


async def test_a_process_that_ends_is_lost_with_its_exit_code_until_it_is_stopped(tmp_path: Path) -> None:
    made = pool(tmp_path, "raise SystemExit(7)")
    await made.start("here-1", "here")
    async with asyncio.timeout(20.0):
        while (found := (await made.machines())[0]).phase is not Phase.LOST:
            await asyncio.sleep(0.01)
    assert "exit code 7" in found.detail
    await made.stop("here-1")
    assert await made.machines() == []


async def test_stopping_what_is_unknown_is_no_error(tmp_path: Path) -> None:
    await pool(tmp_path).stop("nobody")


async def test_a_program_that_cannot_be_started_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    missing = Program((str(tmp_path / "no-such-program"),), {}, tmp_path / "log")
    made = LocalPool([OFFER], invite, lambda machine_id, join: missing, SystemClock())
    with pytest.raises(Refused, match="cannot be started"):
        await made.start("here-1", "here")
    assert await made.machines() == []


async def test_a_machine_that_is_stopped_while_it_is_invited_never_runs(tmp_path: Path) -> None:
    asked, go = asyncio.Event(), asyncio.Event()

    async def slowly(machine_id: str) -> str:
        asked.set()
        await go.wait()
        return "join"

    made = pool(tmp_path, ask=slowly)
    start = asyncio.create_task(made.start("here-1", "here"))
    await asked.wait()
    assert [handle.phase for handle in await made.machines()] == [Phase.STARTING]
    await made.stop("here-1")
    go.set()
    with pytest.raises(Refused, match="stopped"):
        await start
    assert await made.machines() == []
    assert not list(tmp_path.glob("*.log"))

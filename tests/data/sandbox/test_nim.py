"""The game of `examples/games`: what a game of one's own is, from outside the package."""

from __future__ import annotations

import tomllib
from pathlib import Path
from random import Random

import pytest
from games import Sampler, games

from echo2.config.sections import TaskSection
from echo2.data.gold_episode import check_episodes
from echo2.data.inspect import check
from echo2.data.registry import load_task
from echo2.data.sandbox.sandbox import Fault, Outcome, Sandbox
from echo2.data.sandbox.task import SandboxTask
from echo2.errors import ConfigError

FOLDER = Path(__file__).parents[3] / "examples" / "games"


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))


def nim(**options: object) -> SandboxTask:
    task = load_task(TaskSection(name="sandbox", options={"sandbox": "nim:Nim", **options}))
    assert isinstance(task, SandboxTask)
    return task


async def test_the_example_keeps_the_promises_of_a_game() -> None:
    (table,) = tomllib.loads((FOLDER / "nim.toml").read_text())["tasks"]
    task = load_task(TaskSection(**table))
    for split in ("train", "eval"):
        assert check(task, 20, split=split).passed  # type: ignore[arg-type]
        assert (await check_episodes(task, split=split))[1] == []  # type: ignore[arg-type]
    assert {"nim", "echo2.data.sandbox.play"} <= set(task.judging_modules())
    with pytest.raises(ConfigError, match=r"largest must be an integer in 4\.\.1000, got 3"):
        nim(settings={"largest": 3})


def test_the_expert_wins_whenever_it_can() -> None:
    from nim import Nim  # type: ignore[import-not-found]

    game: Sandbox = Nim()
    for seed in range(40):
        turn = game.reset(seed)
        winner = int(turn.view % 4 == 0)
        while turn is not None:
            name = "expert" if turn.seat == winner else "novice"
            done = game.step(game.bots[name](turn.view, Random(seed)))
            assert isinstance(done, Outcome)
            turn = done.turn
        assert (game.gain(winner), game.gain(1 - winner)) == (1.0, -1.0)
    assert isinstance(game.reset(0), object)
    for reply, status in (("four", "unclear"), ("", "unclear"), ("take 2", "unclear")):
        fault = game.step(reply)
        assert isinstance(fault, Fault)
        assert fault.status == status


async def test_a_game_that_pays_what_nobody_lost_is_a_failed_row(monkeypatch: pytest.MonkeyPatch) -> None:
    from nim import Nim

    monkeypatch.setattr(Nim, "gain", lambda self, seat: 1.0)
    ((_, sentence), *_) = (await check_episodes(nim()))[1]
    assert "the gains of a finished game must sum to zero over its seats, got [1.0, 1.0]" in sentence


async def test_a_whole_game_is_an_episode() -> None:
    task = nim(opponents=["novice"])
    (trajectory,) = await games(task, task.prompt("train", 0), Sampler(lambda prompt: "1"))
    assert trajectory.reward in (1.0, -1.0)
    assert sum(trajectory.omega["rewards"]) == trajectory.reward

from __future__ import annotations

from pathlib import Path

import pytest
from games import CHAT, Sampler, calls, games, sandbox_task

from echo2.broadcast.pack import pack_directory
from echo2.config.sections import ModelSection
from echo2.data.sandbox.players import Memory, Speaker
from echo2.data.sandbox.poker.game import Poker
from echo2.data.sandbox.sandbox import Outcome
from echo2.errors import ConfigError
from echo2.rollout.engines.scripted import ScriptedEngine
from echo2.rollout.frozen import EngineModel, FrozenPolicy
from echo2.types import Policy, Sampling


async def test_an_engine_plays_by_text_and_sees_its_own_conversation_only() -> None:
    engine = ScriptedEngine(lambda prompt, random, policy: calls(prompt))
    await engine.prefetch(Policy(0, 0), Path())
    await engine.activate(Policy(0, 0))
    game = Poker()
    turn = game.reset(1)
    player = Speaker(Memory(EngineModel(engine, CHAT, Sampling(1.0, 1.0, 64, 0))), game.rules)
    reply = await player.reply(turn, "")
    assert reply == "Action: call"
    done = game.step(reply)
    assert isinstance(done, Outcome)


async def test_the_same_conversation_gets_the_same_reply_and_another_one_another_seed() -> None:
    engine = Sampler("x")
    seeds = []

    class Noting(Sampler):
        async def generate(self, token_ids, sampling, n):  # type: ignore[no-untyped-def]
            seeds.append(sampling.seed)
            return await engine.generate(token_ids, sampling, n)

    model = EngineModel(Noting(), CHAT, Sampling(1.0, 1.0, 8, 3))  # type: ignore[arg-type]
    for text in ("a", "a", "b"):
        await model([{"role": "user", "content": text}])
    assert seeds[0] == seeds[1] != seeds[2]


@pytest.mark.integration
async def test_an_earlier_version_of_the_policy_sits_at_the_table(tmp_path: Path) -> None:
    from echo2.learning.pretrained import resolve_model

    model_dir = resolve_model(ModelSection(path="tiny:qwen3", snapshot_dtype="float32"), tmp_path, seed=1)
    pack_directory(model_dir, tmp_path / "snapshot", policy=Policy(0, 4))
    frozen = {
        "name": "version 4",
        "model": "echo2.rollout.frozen:FrozenPolicy",
        "options": {"snapshot": str(tmp_path / "snapshot"), "device": "cpu", "threads": 1, "max_tokens": 4},
    }
    task = sandbox_task(sandbox="moba", settings={"ticks": 2}, opponents=[frozen])
    (trajectory,) = await games(task, task.prompt("train", 0), Sampler(calls))
    assert trajectory.omega["opponents"] == ["version 4"]


def test_a_snapshot_that_is_none_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="snapshot must be a folder that echo2 snapshot pack made"):
        FrozenPolicy(snapshot=str(tmp_path))

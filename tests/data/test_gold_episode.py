from __future__ import annotations

from collections.abc import Sequence

import pytest

from echo2.data.gold_episode import EPISODES, check_episodes
from echo2.data.task import Episode, Message, Score, Split, Talk
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.types import Prompt


class Twice(Arithmetic):
    """Asks for the sum, then for the same again."""

    again = "And again?"

    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await talk.say(self.messages(prompt))
        reply = await talk.say([{"role": "user", "content": self.again}])
        return Episode(self.score(prompt, reply))

    def gold_talk(self, prompt: Prompt) -> list[Message]:
        gold: Message = {"role": "assistant", "content": str(self.gold_reply(prompt))}
        return [*self.messages(prompt), gold, {"role": "user", "content": "And again?"}, gold]


async def faults(task: Arithmetic) -> set[str]:
    _, failures = await check_episodes(task)
    return {sentence for _, sentence in failures}


async def test_an_episode_of_gold_replies_and_one_of_empty_ones_are_played() -> None:
    assert await check_episodes(Twice()) == (2 * EPISODES, [])
    assert await check_episodes(Arithmetic()) == (0, [])


class OtherWords(Twice):
    again = "Once more?"


class OnceMore(Twice):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await super().rollout(prompt, talk)
        return Episode(self.score(prompt, await talk.say([])))


class TooSoon(Twice):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        return Episode(self.score(prompt, await talk.say(self.messages(prompt))))


class Mean(Twice):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await super().rollout(prompt, talk)
        return Episode(Score(0.25, "mean"))


class Endless(Twice):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        episode = await super().rollout(prompt, talk)
        while episode.score.reward < 1.0:
            episode = Episode(self.score(prompt, await talk.say([])))
        return episode


class Fragile(Twice):
    def score(self, prompt: Prompt, reply: str) -> Score:
        return Score(float(int(reply) >= 0), "read")


class Boundless(Twice):
    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await super().rollout(prompt, talk)
        return Episode(Score(float("nan"), "?"))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (OtherWords, ["must be the gold talk, got ('user', 'Once more?') in place of ('user', 'And again?')"]),
        (OnceMore, ["must end with the last of them, it asked for one more after 2"]),
        (TooSoon, ["must be the gold talk, it ended after 2 of 4 messages"]),
        (Mean, ["must get reward 1, got 0.25 (mean)"]),
        (Endless, ["an episode of empty replies must end by itself, it went on after 10,000"]),
        (Fragile, ["an episode of empty replies must end with a finite reward, got ValueError"]),
        (
            Boundless,
            [
                "gold talk's replies must end with a finite reward, got a reward must be finite, got nan",
                "empty replies must end with a finite",
            ],
        ),
    ],
)
async def test_a_fault_of_an_episode_is_told(kind: type[Twice], told: Sequence[str]) -> None:
    found = await faults(kind())
    for words in told:
        assert any(words in sentence for sentence in found), found


class Chancy(OtherWords):
    verifiable = False


class Elsewhere(Twice):
    """As on a machine that has no prompts of its own."""

    def prompt(self, split: Split, index: int) -> Prompt:
        raise FileNotFoundError


async def test_what_somebody_else_has_a_say_in_is_not_played_and_a_workers_task_makes_no_prompts() -> None:
    assert await check_episodes(Chancy()) == (0, [])
    assert (await check_episodes(Twice(), worker=Elsewhere()))[1] == []

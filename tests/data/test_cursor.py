from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.cursor import CYCLE, PromptCursor, _shares
from echo2.data.task import Message, Score, Split, Task
from echo2.errors import ConfigError
from echo2.types import Prompt


class Listed(Task):
    def __init__(self, name: str, train: int | None, held_out: int = 3) -> None:
        self.name, self._train, self._held_out = name, train, held_out

    def size(self, split: Split) -> int | None:
        return self._train if split == "train" else self._held_out

    def prompt(self, split: Split, index: int) -> Prompt:
        size = self.size(split)
        assert size is None or 0 <= index < size
        return Prompt(f"{self.name}/{split}/{index}", self.name, {"index": index})

    def messages(self, prompt: Prompt) -> list[Message]:
        return []

    def score(self, prompt: Prompt, reply: str) -> Score:
        return Score(0.0, "wrong")


def test_an_epoch_shows_every_prompt_once_in_an_order_of_its_own() -> None:
    cursor = PromptCursor([(Listed("a", 10), 1.0)], seed=1)
    epochs = [[cursor.prompt(10 * epoch + i).prompt_id for i in range(10)] for epoch in range(3)]
    assert all(len(set(epoch)) == 10 for epoch in epochs)
    assert epochs[0] != epochs[1]


@given(seed=st.integers(0, 5), position=st.integers(0, 5_000))
@settings(max_examples=40, deadline=None)
def test_a_prompt_depends_on_its_position_alone(seed: int, position: int) -> None:
    def fresh() -> PromptCursor:
        return PromptCursor([(Listed("a", 7), 3.0), (Listed("b", None), 1.0)], seed)

    walked = fresh()
    for before in range(max(0, position - 5), position):
        walked.prompt(before)
    assert walked.prompt(position) == fresh().prompt(position)


def test_weights_hold_exactly_over_a_cycle_and_endless_tasks_never_repeat() -> None:
    cursor = PromptCursor([(Listed("a", 7), 3.0), (Listed("b", None), 1.0)], seed=0)
    prompts = [cursor.prompt(position) for position in range(2 * CYCLE)]
    assert Counter(prompt.task for prompt in prompts[:CYCLE]) == {"a": 750, "b": 250}
    endless = [prompt.content["index"] for prompt in prompts if prompt.task == "b"]
    assert endless == list(range(500))


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20), st.integers(20, 2000))
@settings(max_examples=100, deadline=None)
def test_shares_are_whole_complete_and_within_one_of_the_weights(weights: list[float], total: int) -> None:
    shares = _shares(weights, total)
    assert sum(shares) == total
    assert min(shares) >= 1
    exact = [weight / sum(weights) * total for weight in weights]
    if min(exact) >= 1:
        assert all(abs(share - wanted) < 1 + 1e-6 for share, wanted in zip(shares, exact, strict=True))


def test_weights_of_three_tasks_hold_exactly_and_a_run_resumes_in_the_middle_of_a_cycle() -> None:
    def fresh() -> PromptCursor:
        return PromptCursor([(Listed("a", 7), 0.9), (Listed("b", None), 0.09), (Listed("c", 3), 0.01)], seed=5)

    drawn = [fresh().prompt(position) for position in range(CYCLE)]
    assert Counter(prompt.task for prompt in drawn) == {"a": 900, "b": 90, "c": 10}
    resumed = fresh()
    assert [resumed.prompt(position) for position in range(617, CYCLE)] == drawn[617:]


def test_held_out_prompts_are_shared_by_weight_and_limited_by_size() -> None:
    cursor = PromptCursor([(Listed("a", 7, held_out=100), 3.0), (Listed("b", None, held_out=2), 1.0)], seed=0)
    assert Counter(prompt.task for prompt in cursor.eval_prompts(8)) == {"a": 6, "b": 2}
    assert Counter(prompt.task for prompt in cursor.eval_prompts(40)) == {"a": 30, "b": 2}


def test_a_task_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one training prompt"):
        PromptCursor([(Listed("a", 0), 1.0)], seed=0)
    with pytest.raises(ConfigError, match="at least one task"):
        PromptCursor([], seed=0)

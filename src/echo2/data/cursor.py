"""Which prompt comes when.

Invariant: ``prompt`` is a pure function of (tasks, seed, position), so a run resumes its data order from one integer.
In each cycle of ``CYCLE`` positions every task has its share exactly; a finite task shows all its prompts once per
epoch, in an order of that epoch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random

from echo2.data import given
from echo2.data.task import Split, Task
from echo2.errors import ConfigError
from echo2.types import Prompt

CYCLE = 1000
"""Positions over which weights hold exactly: shares finer than 0.1 % are rounded."""


class PromptCursor:
    """tasks: (task, weight). Raises ConfigError where a task's data is unusable, so faults show before a run starts."""

    def __init__(self, tasks: Sequence[tuple[Task, float]], seed: int) -> None:
        names = [task.name for task, _ in tasks]
        if not tasks or len(set(names)) != len(names):
            raise ConfigError(f"a run must have at least one task, under different names, got {names}")
        if len(tasks) > CYCLE:
            raise ConfigError(f"a run must have at most {CYCLE} tasks, got {len(tasks)}")
        self._tasks = [task for task, _ in tasks]
        self._weights = [weight for _, weight in tasks]
        self._seed = seed
        self._sizes = [given.size(task, "train") for task in self._tasks]
        for task, size in zip(self._tasks, self._sizes, strict=True):
            if size == 0:
                raise ConfigError(f"task {task.name} must have at least one training prompt, it has none")
        self._quotas = _shares(self._weights, CYCLE)

    @property
    def tasks(self) -> dict[str, Task]:
        """By name."""
        return {task.name: task for task in self._tasks}

    def prompt(self, position: int) -> Prompt:
        """The training prompt at ``position``, counted from 0 over the whole run."""
        cycle, offset = divmod(position, CYCLE)
        which, before = _cycle_order(tuple(self._quotas), self._seed, cycle)[offset]
        return self._drawn(which, cycle * self._quotas[which] + before)

    def eval_prompts(self, count: int) -> list[Prompt]:
        """The first held-out prompts, ``count`` in all over the tasks by weight; fewer where a split is smaller."""
        return held_out_prompts(list(zip(self._tasks, self._weights, strict=True)), count)

    def _drawn(self, which: int, drawn: int) -> Prompt:
        """The prompt a task gives when ``drawn`` were taken from it before."""
        task, size = self._tasks[which], self._sizes[which]
        if size is None:
            return given.prompt(task, "train", drawn)
        epoch, place = divmod(drawn, size)
        return given.prompt(task, "train", _epoch_order(task.name, size, self._seed, epoch)[place])


def held_out_prompts(tasks: Sequence[tuple[Task, float]], count: int) -> list[Prompt]:
    """``PromptCursor.eval_prompts``, also for tasks without training prompts, such as benchmarks."""
    split: Split = "eval"
    prompts: list[Prompt] = []
    shares = _shares([weight for _, weight in tasks], max(count, len(tasks)))
    for (task, _), share in zip(tasks, shares, strict=True):
        size = given.size(task, split)
        prompts += [given.prompt(task, split, index) for index in range(share if size is None else min(share, size))]
    return prompts


def _shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole shares of ``total`` by weight, each at least one, the rest by largest remainder."""
    exact = [weight / sum(weights) * total for weight in weights]
    shares = [max(1, int(share)) for share in exact]
    while sum(shares) < total:
        shares[max(range(len(shares)), key=lambda i: (exact[i] - shares[i], -i))] += 1
    while sum(shares) > total:  # small weights were given one
        shares[min((i for i in range(len(shares)) if shares[i] > 1), key=lambda i: (exact[i] - shares[i], i))] -= 1
    return shares


@lru_cache(maxsize=4)
def _cycle_order(quotas: tuple[int, ...], seed: int, cycle: int) -> list[tuple[int, int]]:
    """[CYCLE] (task, how often it came before in this cycle)"""
    order = [which for which, quota in enumerate(quotas) for _ in range(quota)]
    Random(f"{seed}/cycle/{cycle}").shuffle(order)
    counts = [0] * len(quotas)
    placed = []
    for which in order:
        placed.append((which, counts[which]))
        counts[which] += 1
    return placed


@lru_cache(maxsize=16)
def _epoch_order(task: str, size: int, seed: int, epoch: int) -> list[int]:
    """[size] indices of an epoch"""
    order = list(range(size))
    Random(f"{seed}/{task}/epoch/{epoch}").shuffle(order)
    return order

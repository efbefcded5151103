"""Which runs there are, and in which order they are worth their time.

Invariant: a run is (task, method, staleness, seed); the order is fixed, so that shares of it never overlap.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.staleness.tasks import TASKS

from echo2.learning.objectives import OBJECTIVES

AGE_FILTER = "grpo, age ≤ 3"
METHODS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"objective": name} for name in OBJECTIVES},
    AGE_FILTER: {"objective": "grpo", "max_age_steps": 3},
}
"""Keys of the learning section."""
REFERENCE = "grpo"
"""Its run at S = 0 is the on-policy run that every other is compared with."""
PAPER = "grpo_paper"
CONTENDERS: tuple[str, ...] = (REFERENCE, PAPER, "dapo", "gepo", "gspo")
"""Of the second stage: the default, the paper's form, and the three that kept most at S = 11 on both tasks in the
screen of seed 0."""
CHOSEN_WITH = 0
"""The seed of the pilots and of that choice."""
SCREENED = ((0, 11, 20), (3, 6), (4,))
"""Ages by how much they decide; all methods and seeds of one tuple come before the next."""
SCREEN_SEEDS, CONTENDER_SEEDS = 2, 10
CONTESTED = (
    (range(4), (0, 11)),
    (range(4), (20, 3, 6)),
    (range(4, CONTENDER_SEEDS), (0, 11, 20, 3, 6)),
)
"""Seeds and ages of the contenders. Seed by seed over all cells: every additional one narrows all intervals."""


class Cell(NamedTuple):
    task: str
    method: str
    staleness: int
    seed: int


def screen(ages: Sequence[Sequence[int]] = SCREENED) -> Iterator[Cell]:
    for budgets in ages:
        for seed in range(SCREEN_SEEDS):
            for staleness in budgets:
                yield from _row(METHODS, staleness, seed)


def contenders() -> Iterator[Cell]:
    for seeds, ages in CONTESTED:
        for seed in seeds:
            for staleness in ages:
                yield from _row([method for method in CONTENDERS if staleness or method == REFERENCE], staleness, seed)


def _row(methods: Sequence[str] | Mapping[str, Any], staleness: int, seed: int) -> Iterator[Cell]:
    for method in methods:
        for task in TASKS:
            if not is_the_same_again(method, staleness):
                yield Cell(task, method, staleness, seed)


def is_the_same_again(method: str, staleness: int) -> bool:
    """The filter leaves out nothing up to its age, and beyond it whatever it does is the same at every age."""
    return method == AGE_FILTER and staleness not in (6, 11)


STAGES: Mapping[str, Sequence[Cell]] = {
    "screen": [*screen()],
    "contenders": [*contenders()],
    "all": [*dict.fromkeys((*screen(SCREENED[:1]), *contenders(), *screen()))],
}


def of_share(cells: Sequence[Cell], share: str) -> list[Cell]:
    """share: ``i/n``, i from 0. Raises ValueError."""
    number, of = map(int, share.split("/"))
    if not 0 <= number < of:
        raise ValueError(f"a share must be i/n with 0 <= i < n, got {share}")
    return [*cells[number::of]]

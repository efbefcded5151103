from __future__ import annotations

import torch

from echo2.rollout.engines.prefixes import SHORTEST_PREFIX, Prefixes


def states(length: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Column i holds the number i; eight bytes a token."""
    numbers = torch.arange(float(length)).reshape(1, 1, length, 1)
    return [(numbers, numbers)]


def test_a_prompt_that_goes_on_finds_all_but_what_is_new() -> None:
    known = Prefixes(1 << 20)
    known.keep(range(20), states(20))
    length, found = known.longest([*range(20), 7, 8])
    assert length == 20
    assert found[0][0].flatten().tolist() == list(range(20))


def test_the_last_token_is_always_read_and_a_part_of_an_entry_is_enough() -> None:
    known = Prefixes(1 << 20)
    known.keep(range(20), states(20))
    assert known.longest(range(20))[0] == 19
    length, found = known.longest([*range(12), 99, 98])
    assert (length, found[0][1].shape[2]) == (12, 12)
    assert known.longest([99, *range(20)]) == (0, ())
    assert known.longest(range(SHORTEST_PREFIX)) == (0, ())


def test_an_entry_that_another_continues_gives_way_to_it() -> None:
    known = Prefixes(1 << 20)
    for length in (20, 30, 25):
        known.keep(range(length), states(length))
    assert (len(known), known.held_bytes) == (1, 240)


def test_the_store_is_bounded_and_forgets_who_was_not_asked_for_longest() -> None:
    known = Prefixes(3 * 160)
    for first in (100, 200, 300):
        known.keep(range(first, first + 20), states(20))
    assert known.longest(range(100, 121))[0] == 20
    known.keep(range(400, 420), states(20))
    assert [known.longest(range(first, first + 21))[0] for first in (100, 200, 300, 400)] == [20, 0, 20, 20]
    assert known.held_bytes <= 480
    known.keep(range(1000), states(1000))
    assert len(known) == 3
    known.clear()
    assert (len(known), known.held_bytes) == (0, 0)

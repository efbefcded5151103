from __future__ import annotations

from itertools import pairwise

import pytest

from echo2.broadcast.director.rates import UNKNOWN_NODE, UNKNOWN_UPLINK, Rates
from echo2.broadcast.plan.model import SEED

MB = 1e6
LINE = ("a", "b", "c", "d", "e")


def line(rate_mb: float = 10.0, names: tuple[str, ...] = LINE) -> dict[tuple[str, str], float]:
    """Planned flows of a chain."""
    return dict.fromkeys(pairwise((SEED, *names)), rate_mb * MB)


def transfer(rates: Rates, flows_mb: dict[tuple[str, str], float], planned_mb: float = 10.0) -> None:
    rates.begin(line(planned_mb), relayed=True)
    for (parent, child), rate in flows_mb.items():
        rates.saw(parent, child, rate * MB)


def warmed(rates: Rates, *flows_mb: float) -> None:
    """The links of the line after the seed's own."""
    rates.begin(line(), relayed=False)
    for (parent, child), rate in zip(pairwise(LINE), flows_mb, strict=True):
        rates.saw(parent, child, rate * MB)


def in_mb(rates: Rates, name: str) -> tuple[float, float]:
    up, down = rates.of([name])[name]
    return up / MB, down / MB


def test_before_anything_flowed_a_guess_is_taken() -> None:
    rates = Rates()
    assert rates.of(["a"]) == {"a": (UNKNOWN_NODE, UNKNOWN_NODE)}
    assert rates.uplink() == UNKNOWN_UPLINK


def test_a_flow_proves_what_both_ends_can_and_others_are_taken_to_be_usual() -> None:
    rates = Rates()
    warmed(rates, 8, 8, 10, 8)
    assert in_mb(rates, "c") == (10, 8)
    assert in_mb(rates, "d") == (8, 10)
    assert in_mb(rates, "a") == (8, 8), "nobody but the seed fed it"
    assert in_mb(rates, "stranger") == (8, 8)


def test_of_two_ends_of_a_slow_flow_the_one_whose_other_flows_are_slow_is_to_blame() -> None:
    rates = Rates()
    warmed(rates, 10, 2, 2, 10)
    assert in_mb(rates, "c") == (2, 2)
    assert in_mb(rates, "b") == in_mb(rates, "d") == (10, 10)


def test_who_gets_little_because_its_parent_gets_little_is_not_to_blame() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    for noise in range(3):
        slow = 2 + noise / 100
        transfer(rates, {(SEED, "a"): 10, ("a", "b"): 10 - noise / 100, ("b", "c"): slow, ("c", "d"): slow - 0.001})
    rates.begin({}, relayed=True)
    assert in_mb(rates, "d") == (10, 10)
    assert in_mb(rates, "c")[1] == pytest.approx(2.02)


def test_the_best_of_three_transfers_counts() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    for rate in (2.0, 3.0):
        transfer(rates, {(SEED, "a"): 10, ("a", "b"): rate})
    rates.begin({}, relayed=True)
    assert in_mb(rates, "b")[1] == 10
    transfer(rates, {(SEED, "a"): 10.1, ("a", "b"): 4.0})
    rates.begin({}, relayed=True)
    assert in_mb(rates, "b")[1] == 4
    transfer(rates, {(SEED, "a"): 10.2, ("a", "b"): 9.0})
    assert in_mb(rates, "b")[1] == 9, "what is better counts at once"


def test_flows_at_the_same_time_add_up() -> None:
    rates = Rates()
    rates.begin({("p", "x"): 5 * MB, ("p", "y"): 5 * MB, (SEED, "y"): 3 * MB}, relayed=True)
    for parent, child, rate in (("p", "x", 5), ("p", "y", 4.9), (SEED, "y", 3)):
        rates.saw(parent, child, rate * MB)
    assert in_mb(rates, "p")[0] == pytest.approx(9.9)
    assert in_mb(rates, "y")[1] == pytest.approx(7.9)


def test_a_repeated_number_is_no_new_measurement_and_a_flow_nobody_planned_is_none() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    transfer(rates, {(SEED, "a"): 10, ("a", "b"): 2})
    for _ in range(5):
        transfer(rates, {(SEED, "a"): 10, ("a", "b"): 2})
    rates.saw("e", "a", 1000 * MB)
    assert in_mb(rates, "b")[1] == 10
    assert in_mb(rates, "a")[1] == in_mb(rates, "e")[0] == 10


def test_a_plan_that_gave_little_says_little() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    transfer(rates, {(SEED, "a"): 2, ("a", "b"): 2, ("b", "x"): 2}, planned_mb=2)
    rates.begin({}, relayed=True)
    assert in_mb(rates, "b") == (10, 10)


def test_a_head_that_gets_far_less_than_the_other_heads_is_slow() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    rates.begin({(SEED, name): 10 * MB for name in "uvw"}, relayed=True)
    for name, rate in zip("uvw", (10, 9, 2), strict=True):
        rates.saw(SEED, name, rate * MB)
    assert in_mb(rates, "w")[1] == 2
    assert in_mb(rates, "v")[1] == 10


def test_who_gets_more_from_the_seed_than_from_peers_may_be_able_to_get_still_more() -> None:
    """Uploads slower than downloads: peers only ever send 1."""
    rates = Rates()
    for name in LINE:
        rates.saw(SEED, name, 3 * MB)
    warmed(rates, 1, 1, 1, 1)
    assert in_mb(rates, "b") == (1, 4.5)
    rates.begin({(SEED, name): 4.5 * MB for name in LINE}, relayed=True)
    for name in LINE:
        rates.saw(SEED, name, 3.1 * MB)
    rates.begin({}, relayed=True)
    assert in_mb(rates, "b") == (1, pytest.approx(3.1)), "it was tried"


# ---- the seed ------------------------------------------------------------------------------------------------------


def joined(rates: Rates, egress_mb: float, names: tuple[str, ...] = LINE) -> None:
    for name in names:
        rates.saw(SEED, name, egress_mb / len(names) * MB)
    rates.egress(egress_mb * MB)


def test_an_uplink_that_held_its_children_up_is_known() -> None:
    rates = Rates()
    joined(rates, 20)
    warmed(rates, 10, 10, 10, 10)
    assert rates.uplink() == 20 * MB


def test_an_uplink_whose_children_all_ran_at_their_own_rate_may_be_better() -> None:
    """For half as many again, or for one child more."""
    rates = Rates()
    joined(rates, 50)
    warmed(rates, 10, 10, 10, 10)
    assert rates.uplink() == 75 * MB
    rates = Rates()
    joined(rates, 10, ("a",))
    warmed(rates, 10, 10, 10, 10)
    assert rates.uplink() == 20 * MB


def test_an_uplink_once_known_stays_known_while_it_feeds_as_many_as_it_can() -> None:
    rates = Rates()
    joined(rates, 20)
    warmed(rates, 10, 10, 10, 10)
    for noise in range(6):
        rates.begin({(SEED, "a"): 10 * MB, (SEED, "b"): 10 * MB}, relayed=True)
        joined(rates, 20 - noise / 100, ("a", "b"))
        assert rates.uplink() == 20 * MB


def test_an_uplink_that_became_worse_is_believed_after_three_transfers() -> None:
    rates = Rates()
    joined(rates, 20)
    warmed(rates, 10, 10, 10, 10)
    for noise in range(3):
        assert rates.uplink() == 20 * MB
        rates.begin({(SEED, "a"): 10 * MB, (SEED, "b"): 10 * MB}, relayed=True)
        joined(rates, 7 - noise / 100, ("a", "b"))
    rates.begin({}, relayed=True)
    assert rates.uplink() == 7 * MB


def test_a_transfer_that_was_held_back_says_nothing_of_the_uplink() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    rates.begin({(SEED, name): 10 * MB for name in LINE}, relayed=True)
    for name in LINE:
        rates.saw(SEED, name, 6 * MB)
    rates.egress(30 * MB)
    assert rates.uplink() == 30 * MB and not rates.explores(40 * MB), "its children got less than they can take"
    for _ in range(5):
        rates.begin({(SEED, "a"): 10 * MB}, relayed=True, held=True)
        rates.saw(SEED, "a", 9.9 * MB)
        rates.egress(9.9 * MB)
    assert rates.uplink() == 30 * MB and not rates.explores(40 * MB)


def test_what_a_node_can_do_is_known_once_it_was_seen_at_work() -> None:
    rates = Rates()
    transfer(rates, {(SEED, "a"): 10, ("a", "b"): 10})
    assert not rates.knows("a", "b"), "the transfer may still show more"
    rates.begin({}, relayed=True)
    assert rates.knows("a", "b") and rates.knows(SEED, "b") and rates.knows(SEED, "a")
    assert not rates.knows("b", "a") and not rates.knows("a", "c")


def test_only_what_goes_beyond_what_was_seen_explores_the_uplink() -> None:
    rates = Rates()
    warmed(rates, 10, 10, 10, 10)
    rates.begin({(SEED, name): 10 * MB for name in LINE}, relayed=True)
    for name in LINE:
        rates.saw(SEED, name, 10 * MB)
    rates.egress(40 * MB)
    assert rates.uplink() == 60 * MB, "all ran at their own rates, so there may be more"
    assert not rates.explores(40 * MB)
    assert rates.explores(50 * MB)

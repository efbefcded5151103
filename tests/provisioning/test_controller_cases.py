"""Field reports on provisioning, recreated as they were told: I01, I02, I03, I05 and D07."""

from __future__ import annotations

import msgspec
import pytest
from closed_loop import ClosedLoop, Seller, offer, rules
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.provisioning.controller import State, decide
from echo2.provisioning.decisions import Activate, Keep, Release
from echo2.provisioning.observation import Listing, Machine, Observation, Phase, Price
from echo2.provisioning.rates import Estimate

HOUR_S = 3600.0


def at(now_s: float, *listings: Listing, machines: tuple[Machine, ...] = ()) -> Observation:
    return Observation(now_s=now_s, t_train_s=100.0, t_bcast_s=20.0, listings=listings, machines=machines)


def activated(loop: ClosedLoop) -> int:
    return sum(len(d.machine_ids) for d in loop.actions() if isinstance(d, Activate))


# ---- I01: unknown or stale price ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spot",
    [
        pytest.param((Price(0.0, 18_000.0),), id="zero"),
        pytest.param((Price(0.3, 18_000.0), Price(0.0, 18_000.0)), id="rows-of-one-type-the-last-of-them-zero"),
        pytest.param((), id="nothing"),
        pytest.param((Price(0.007, 0.0),), id="five-hours-old"),
    ],
)
def test_i01_an_unknown_or_stale_price_is_neither_free_nor_believed(spot: tuple[Price, ...]) -> None:
    on_demand = Listing(offer("on-demand", 0.25, 1.2), (Price(0.25, 18_000.0),))
    _, decisions = decide(State(), at(18_000.0, Listing(offer("spot", 0.1, 1.2), spot), on_demand), rules())
    (order,) = decisions
    assert isinstance(order, Activate)
    assert order.offer == "on-demand"
    assert (order.usd_per_h, order.priced_at_s) == (0.25, 18_000.0)
    assert "at 0.25 USD/h (the price of 0 s ago)" in order.reason


def test_i01_the_last_good_price_counts_within_a_stated_age_and_the_decision_tells_its_time() -> None:
    told = Listing(offer("spot", 0.1, 1.2), (Price(0.21, 1000.0),))
    silent = Listing(told.offer, (Price(0.0, 2000.0), Price(None, 2500.0)))
    state, _ = decide(State(), msgspec.structs.replace(at(1000.0, told), t_train_s=None), rules(first_machines=0))
    _, (order,) = decide(state, at(1000.0 + HOUR_S, silent), rules())
    assert isinstance(order, Activate)
    assert (order.usd_per_h, order.priced_at_s) == (0.21, 1000.0)
    assert "the price of 3600 s ago" in order.reason
    _, (kept,) = decide(state, at(1001.0 + HOUR_S, silent), rules())
    assert isinstance(kept, Keep)
    assert "spot: its price is unknown or older than 3600 s" in kept.reason


def test_i01_of_several_sellers_of_one_moment_the_dearest_is_planned_with() -> None:
    rows = Listing(offer("spot", 0.1, 1.2), (Price(0.2, 60.0), Price(0.5, 60.0), Price(0.000, 60.0), Price(9.0, 10.0)))
    _, (order,) = decide(State(), at(60.0, rows), rules())
    assert isinstance(order, Activate)
    assert order.usd_per_h == 0.5


def test_a_price_from_the_future_is_not_known_yet() -> None:
    ahead = Listing(offer("spot", 0.1, 1.2), (Price(0.2, 1e6),))
    _, (kept,) = decide(State(), at(60.0, ahead), rules())
    assert isinstance(kept, Keep)


# ---- I02: instances being started are not counted -------------------------------------------------------------------


def test_i02_never_more_than_four_running_and_starting_and_a_failed_launch_is_replaced_once() -> None:
    """Need 4 (1.1 / 0.3), tick 10 s, boot 60 s, one launch fails."""
    by = rules(period_s=10.0, cool_down_s=0.0, back_off_s=30.0)
    loop = ClosedLoop(by, [Seller(offer("c", 1.0, 0.3), boot_s=60.0, fails=1)], exact=True)
    for _ in range(60):
        loop.run(1)
        assert len(loop.of(Phase.ACTIVE, Phase.STARTING)) <= 4
    assert len(loop.of(Phase.ACTIVE)) == 4
    assert activated(loop) == 5
    assert "c-1 did not start" in loop.actions()[1].reason


def test_i02_a_launch_that_never_joins_is_given_up_at_its_deadline_and_replaced_once() -> None:
    by = rules(period_s=10.0, start_s=120.0, back_off_s=20.0)
    stuck = Seller(offer("c", 1.0, 0.3), boot_s=60.0)
    loop = ClosedLoop(by, [stuck], exact=True)
    loop.run(1)
    loop.machines["c-2"].up_s = 1e9
    for _ in range(60):
        loop.run(1)
        assert len(loop.of(Phase.ACTIVE, Phase.STARTING)) <= 4
    assert [d.machine_id for d in loop.actions() if isinstance(d, Release)] == ["c-2"]
    assert activated(loop) == 5


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.lists(st.sampled_from(["pool", "worker", "both", "nobody"]), min_size=4, max_size=4), min_size=8, max_size=8
    )
)
def test_i02_the_hand_over_from_starting_to_ready_counts_nobody_twice_or_not_at_all(reports: list[list[str]]) -> None:
    """The tick runs while machines go from starting to ready: the pool lists them or does not yet, their workers were
    heard or were not yet, in every interleaving. A worker that was heard goes on being heard."""
    by = rules(period_s=10.0, cool_down_s=0.0)
    listing = Listing(offer("c", 1.0, 0.3, count=4), (Price(1.0, 0.0),))
    state, (order,) = decide(State(), at(10.0, listing), by)
    assert isinstance(order, Activate)
    heard: set[str] = set()
    for number, who in enumerate(reports, start=2):
        machines = []
        for name, says in zip(order.machine_ids, who, strict=True):
            if says in ("pool", "both"):
                machines.append(Machine(machine_id=name, offer="c", phase=Phase.STARTING, usd_per_h=1.0))
            if says in ("worker", "both"):
                heard.add(name)
            if name in heard:
                machines.append(Machine(machine_id=name, phase=Phase.ACTIVE, rate=Estimate(0.3), delivered=True))
        state, decisions = decide(state, at(10.0 * number, listing, machines=tuple(machines)), by)
        assert not any(isinstance(decision, Activate) for decision in decisions)


def test_i02_the_count_of_an_offer_is_never_exceeded() -> None:
    by = rules(period_s=10.0, cool_down_s=0.0, start_s=50.0, back_off_s=10.0)
    loop = ClosedLoop(by, [Seller(offer("c", 1.0, 0.1, count=5), boot_s=40.0, fails=3)], exact=True)
    for step in range(80):
        loop.run(1)
        assert loop.count("c") <= 5
        if step % 9 == 8 and loop.of(Phase.ACTIVE):
            loop.kill(loop.of(Phase.ACTIVE)[0].machine_id)


# ---- I03: flapping around the threshold -----------------------------------------------------------------------------


def needing(workers: float) -> float:
    """T_train for which the target is so many workers of 0.3 trajectories/s."""
    return 1.1 * 100 / (0.3 * workers)


def settled_loop() -> ClosedLoop:
    loop = ClosedLoop(rules(), [Seller(offer("c", 1.0, 0.3))], t_train_s=needing(3.9), exact=True)
    loop.run(10)
    assert loop.count("c") == 4
    return loop


def test_i03_a_need_of_3_9_and_4_1_by_turns_changes_at_most_once_in_an_hour() -> None:
    loop = settled_loop()
    for tick in range(60):
        loop.t_train_s = needing(3.9 if tick % 2 else 4.1)
        loop.run(1)
    assert len(loop.actions(600.0)) <= 1


def test_i03_a_spike_of_one_tick_is_ignored() -> None:
    loop = settled_loop()
    loop.t_train_s = needing(12)
    loop.run(1)
    loop.t_train_s = needing(3.9)
    loop.run(60)
    assert loop.actions(600.0) == []


def test_i03_a_change_that_lasts_three_ticks_is_acted_on_once() -> None:
    loop = settled_loop()
    loop.t_train_s = needing(6)
    loop.run(3)
    assert loop.count("c") == 6
    loop.run(57)
    assert len(loop.actions(600.0)) == 1


def test_i03_a_single_odd_tick_does_not_begin_the_count_again() -> None:
    loop = settled_loop()
    for tick in range(5):
        loop.t_train_s = needing(3.9 if tick == 2 else 6)
        loop.run(1)
    assert loop.count("c") == 6


def test_i03_moments_in_which_no_pool_could_be_large_enough_do_not_begin_the_count_again() -> None:
    """Times near the edge of (2'): every other reading has no answer, and the others lack machines."""
    machine = Machine(machine_id="c-1", phase=Phase.ACTIVE, rate=Estimate(0.3), delivered=True)
    state, ordered_s = State(judged_s=0.0), []
    for look in range(6):
        now_s = 600.0 + 60.0 * look
        seen = at(now_s, Listing(offer("c", 1.0, 0.3), (Price(1.0, now_s),)), machines=(machine,))
        t_bcast_s = 1e4 if look % 2 else 20.0
        state, decisions = decide(state, msgspec.structs.replace(seen, t_bcast_s=t_bcast_s), rules())
        ordered_s += [now_s for decision in decisions if isinstance(decision, Activate)]
    assert ordered_s == [600.0 + 60.0 * 4], "the third reading that says so"


# ---- I05: preemption ------------------------------------------------------------------------------------------------


def test_i05_a_kill_without_notice_is_replaced_at_the_next_look_and_its_price_stops() -> None:
    loop = settled_loop()
    loop.kill("c-2")
    spent_usd = loop.ledger.by_name_usd(loop.now_s)["c-2"]
    loop.look()
    assert loop.count("c") == 4
    assert "c-2 went away" in loop.actions(599.0)[-1].reason
    loop.run(30)
    assert loop.ledger.by_name_usd(loop.now_s)["c-2"] == spent_usd
    assert len(loop.actions(600.0)) == 0


def test_i05_notice_is_as_good_as_gone() -> None:
    loop = settled_loop()
    loop.machines["c-2"].phase = Phase.DRAINING
    loop.look()
    assert loop.count("c") == 4
    loop.run(30)
    assert len(loop.of(Phase.ACTIVE)) == 4
    assert len(loop.actions(600.0)) == 0, "the end of its notice is no second loss"


def test_i05_a_kill_during_set_up_is_a_preemption_and_not_the_offers_failure() -> None:
    loop = ClosedLoop(rules(), [Seller(offer("c", 1.0, 0.3), boot_s=300.0)], exact=True)
    loop.run(2)
    loop.kill("c-3")
    loop.look()
    assert loop.count("c") == 4
    loop.run(20)
    assert len(loop.of(Phase.ACTIVE)) == 4


def test_i05_machines_that_are_killed_one_after_another_are_replaced_during_the_cool_down_too() -> None:
    loop = settled_loop()
    for name in ("c-1", "c-2", "c-3"):
        loop.kill(name)
        loop.look()
        assert loop.count("c") == 4


# ---- D07: all workers dead ------------------------------------------------------------------------------------------


def test_d07_workers_that_all_exit_after_they_registered_are_named_and_not_restarted_without_end() -> None:
    """What is visible: which machines went away, and when the offer is tried again. What it costs is bounded."""
    loop = ClosedLoop(rules(), [Seller(offer("c", 1.0, 0.3))])
    for _ in range(240):
        loop.run(1)
        for machine in loop.of(Phase.ACTIVE):
            loop.kill(machine.machine_id)
    assert activated(loop) <= 4 * 12, "four hours of a broken image: the back-off doubles from two minutes on"
    waits = [d.reason for _, d in loop.decided if isinstance(d, Keep) and "tried again in" in d.reason]
    assert "went away" in waits[-1]
    assert "0 active machines deliver 0 trajectories/s" in waits[-1]


def test_d07_a_pool_that_recovers_is_filled_again() -> None:
    loop = settled_loop()
    for machine in loop.of(Phase.ACTIVE):
        loop.kill(machine.machine_id)
    loop.run(3)
    assert len(loop.of(Phase.ACTIVE)) == 4

"""T_bcast, and the times that capacity is planned by."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.config.root import Config
from echo2.coordinator.publishing import Publishing
from echo2.coordinator.scoreboard import Scoreboard
from echo2.types import Policy

OLD, NEW = Policy(0, 2), Policy(0, 4)


def publishing(rates_per_s: Mapping[str, float]) -> Publishing:
    made = Publishing(gamma=1.1)
    made.start(NEW, rates_per_s, 10.0)
    made.visible(NEW, 12.0)
    return made


def test_the_publish_ends_when_its_share_of_the_generating_workers_installed_it() -> None:
    made = publishing({f"w{i}": 2.0 for i in range(20)})
    for number in range(18):
        made.installs(f"w{number}", NEW)
        assert made.arrived({}, 20.0) is None, "ceil(20 / 1.1) = 19"
    made.installs("w18", NEW)
    assert made.arrived({}, 21.0) == (NEW, 11.0)
    made.installs("w19", NEW)
    assert made.arrived({}, 22.0) is None, "once"


@given(st.lists(st.floats(0.01, 100.0), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_each_worker_counts_for_what_it_delivers(rates: list[float], random: object) -> None:
    workers = {f"w{number}": rate for number, rate in enumerate(rates)}
    made, order = publishing(workers), list(workers)
    random.shuffle(order)  # type: ignore[attr-defined]
    have = 0.0
    for name in order:
        assert made.arrived({}, 19.0) is None
        made.installs(name, NEW)
        have += workers[name]
        if have >= sum(rates) / 1.1 * (1 - 1e-12):
            break
    assert made.arrived({}, 20.0) == (NEW, 10.0)


def test_who_joins_during_a_publish_does_not_make_it_look_slow() -> None:
    made = publishing({"w0": 1.0})
    assert made.arrived({OLD: 1, None: 2}, 13.0) is None
    made.installs("joined", NEW)
    assert made.arrived({OLD: 1, NEW: 1, None: 1}, 13.0) is None
    made.installs("w0", NEW)
    assert made.arrived({NEW: 2, None: 1}, 14.0) == (NEW, 4.0)


def test_who_hardly_delivers_keeps_nobody_waiting() -> None:
    made = publishing({"w0": 4.0, "w1": 4.0, "slow": 0.5})
    for name in ("w0", "slow"):
        made.installs(name, NEW)
    assert made.arrived({}, 13.0) is None
    other = publishing({"w0": 4.0, "w1": 4.0, "slow": 0.5})
    for name in ("w0", "w1"):
        other.installs(name, NEW)
    assert other.arrived({}, 14.0) == (NEW, 4.0)


def test_while_nobody_has_delivered_all_count_the_same() -> None:
    made = publishing({"w0": 0.0, "w1": 0.0})
    made.installs("w0", NEW)
    assert made.arrived({}, 13.0) is None
    made.installs("w1", NEW)
    assert made.arrived({}, 14.0) == (NEW, 4.0)


def test_who_leaves_during_a_publish_is_not_waited_for() -> None:
    made = publishing({"w0": 1.0, "w1": 1.0})
    made.installs("w1", NEW)
    made.loses("w0")
    assert made.arrived({NEW: 1}, 14.0) == (NEW, 4.0)


def test_an_older_install_is_not_this_publish() -> None:
    made = publishing({"w0": 1.0})
    made.installs("w0", OLD)
    assert made.arrived({OLD: 1}, 14.0) is None


@pytest.mark.parametrize("gone", [(), ("w0", "w1")])
def test_where_nobody_generated_or_is_left_everybody_counts(gone: tuple[str, ...]) -> None:
    made = publishing(dict.fromkeys(gone, 1.0))
    for name in gone:
        made.loses(name)
    assert made.arrived({}, 13.0) is None
    assert made.arrived({None: 1, NEW: 1}, 13.0) is None
    assert made.arrived({NEW: 2}, 15.0) == (NEW, 5.0)


def test_one_slow_publish_asks_for_no_more_machines() -> None:
    board = Scoreboard(Config())
    board.disseminated(40.0)  # The first is a whole snapshot.
    board.disseminated(3.0)
    assert board.usual_t_bcast_s == 3.0
    for seconds in (2.0, 30.0, 4.0):
        board.disseminated(seconds)
    assert (board.t_bcast_s, board.usual_t_bcast_s) == (4.0, 4.0)


def test_the_target_follows_the_chosen_rule() -> None:
    def target(rule: str) -> float | None:
        board = Scoreboard(Config.model_validate({"provisioning": {"rule": rule, "gamma": 1.25}}))
        board.trained(10.0)
        board.disseminated(4.0)
        return board.required(2.0).target_per_s

    assert target("overlapped") == pytest.approx(1.25 * 64 / 10)
    assert target("paper") == pytest.approx(1.25 * 2 * 64 / (2 * 10 - 4))

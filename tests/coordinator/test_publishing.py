"""T_bcast, and the times that capacity is planned by."""

from __future__ import annotations

import pytest

from echo2.config.root import Config
from echo2.coordinator.publishing import Holding, Publishing
from echo2.coordinator.scoreboard import Scoreboard
from echo2.types import Policy

OLD, NEW = Policy(0, 2), Policy(0, 4)


def publishing(active: Holding) -> Publishing:
    made = Publishing(gamma=1.1)
    made.start(NEW, {name: 1.0 for name, held in active.items() if held is not None}, 10.0)
    made.visible(NEW, 12.0)
    return made


def test_the_publish_ends_when_its_share_of_the_generating_workers_installed_it() -> None:
    before: Holding = {f"w{i}": OLD for i in range(20)}
    made = publishing(before)
    most = {name: NEW if i < 18 else OLD for i, name in enumerate(before)}
    assert made.installed(most, 20.0) is None, "ceil(20 / 1.1) = 19"
    assert made.installed({**most, "w18": NEW}, 21.0) == (NEW, 11.0)
    assert made.installed({**most, "w18": NEW}, 22.0) is None, "once"


def test_who_joins_during_a_publish_does_not_make_it_look_slow() -> None:
    made = publishing({"w0": OLD, "starting": None})
    assert made.installed({"w0": OLD, "starting": None, "joined": None}, 13.0) is None
    assert made.installed({"w0": NEW, "starting": None, "joined": None}, 14.0) == (NEW, 4.0)


def test_who_hardly_delivers_keeps_nobody_waiting() -> None:
    made = Publishing(gamma=1.1)
    made.start(NEW, {"w0": 4.0, "w1": 4.0, "slow": 0.5}, 10.0)
    made.visible(NEW, 12.0)
    assert made.installed({"w0": NEW, "w1": OLD, "slow": NEW}, 13.0) is None
    assert made.installed({"w0": NEW, "w1": NEW, "slow": OLD}, 14.0) == (NEW, 4.0)


def test_while_nobody_has_delivered_all_count_the_same() -> None:
    made = Publishing(gamma=1.1)
    made.start(NEW, {"w0": 0.0, "w1": 0.0}, 10.0)
    made.visible(NEW, 12.0)
    assert made.installed({"w0": NEW, "w1": OLD}, 13.0) is None
    assert made.installed({"w0": NEW, "w1": NEW}, 14.0) == (NEW, 4.0)


def test_who_leaves_during_a_publish_is_not_waited_for() -> None:
    made = publishing({"w0": OLD, "w1": OLD})
    assert made.installed({"w1": NEW}, 14.0) == (NEW, 4.0)


@pytest.mark.parametrize("before", [{}, {"w0": None}, {"gone": OLD}])
def test_where_nobody_generated_or_is_left_everybody_counts(before: Holding) -> None:
    made = publishing(before)
    assert made.installed({}, 13.0) is None
    assert made.installed({"w0": None, "w1": NEW}, 13.0) is None
    assert made.installed({"w0": NEW, "w1": NEW}, 15.0) == (NEW, 5.0)


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

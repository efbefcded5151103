from __future__ import annotations

import pytest

from echo2.broadcast.director.fleet import PROBE_AGAIN_S
from echo2.broadcast.plan.model import Topology
from echo2.broadcast.relay.frames import Report
from echo2.broadcast.relay.seed import Seed
from echo2.errors import Malformed

W1 = ("w1", "10.0.0.1", 7000)


def reachable(seed: Seed) -> bool | None:
    (state,) = seed.director.nodes()
    return state.reachable


def test_h11_an_answer_about_an_earlier_life_of_a_node_says_nothing_of_this_one() -> None:
    """Although it listens where it did before."""
    seed = Seed(Topology.CHAIN, 1.1, "")
    source = seed.link_up(1, *W1, 0.0)
    seed.link_down(1, 1.0)
    assert seed.link_up(2, *W1, 2.0) == source
    seed.probed(source, 1, False, 3.0)
    assert reachable(seed) is None
    seed.probed(source, 2, True, 4.0)
    seed.probed(source, 1, False, 5.0)
    assert reachable(seed) is True


def test_who_could_not_be_dialled_back_is_tried_again_over_the_link_of_this_life() -> None:
    seed = Seed(Topology.CHAIN, 1.1, "")
    source = seed.link_up(1, *W1, 0.0)
    seed.probed(source, 1, False, 0.0)
    assert seed.probes_due(PROBE_AGAIN_S / 2) == []
    assert seed.probes_due(PROBE_AGAIN_S) == [(source, 1)]
    seed.link_down(1, PROBE_AGAIN_S)
    assert seed.probes_due(1e6) == []


def test_reports_count_over_the_newest_first_link_alone() -> None:
    seed = Seed(Topology.CHAIN, 1.1, "")
    seed.link_up(1, *W1, 0.0)
    seed.link_up(2, *W1, 1.0)
    seed.report(2, Report(sent_bytes=5), 2.0)
    with pytest.raises(Malformed, match="lane 0"):
        seed.report(1, Report(sent_bytes=9), 2.0)
    assert [state.sent_bytes for state in seed.director.nodes()] == [5]


@pytest.mark.parametrize(("advertised", "host"), [("", "127.0.0.1"), ("learner.test", "learner.test")])
def test_a_node_of_the_seeds_own_machine_is_reached_under_the_seeds_name(advertised: str, host: str) -> None:
    seed = Seed(Topology.CHAIN, 1.1, advertised)
    assert seed.link_up(1, "w1", "127.0.0.1", 7000, 0.0).host == host

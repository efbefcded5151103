from __future__ import annotations

import heapq
import math
import random
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.broadcast.plan.make import make_plan
from echo2.broadcast.plan.model import MOST_STRETCHES, SEED, Node, Plan, Stream, Topology

MBPS = 1e6 / 8
LATENCY_S = 0.02


@st.composite
def fleets(draw: st.DrawFn) -> list[Node]:
    rates = st.sampled_from([2.0, 10.0, 30.0, 50.0, 90.0, 100.0, 110.0, 1000.0]).map(lambda x: x * MBPS)
    count = draw(st.integers(1, 14))
    alike = draw(st.booleans())
    up, down = draw(rates), draw(rates)
    return [
        Node(f"w{k:02}", up if alike else draw(rates), down if alike else draw(rates), draw(st.integers(0, 3)) > 0)
        for k in range(count)
    ]


plans = st.builds(
    lambda topology, nodes, uplink, chunks, gamma: (
        nodes,
        uplink * MBPS,
        make_plan(topology, nodes, uplink * MBPS, chunks * 65536 - 7, 65536, LATENCY_S, gamma),
    ),
    st.sampled_from(Topology),
    fleets(),
    st.sampled_from([5.0, 50.0, 300.0, 790.0, 2000.0]),
    st.integers(1, 300),
    st.sampled_from([1.0, 1.1, 2.0]),
)


def chunk_numbers(stream: Stream) -> list[int]:
    return [number for stretch in stream.stretches for number in stretch.numbers()]


def simulate(plan: Plan) -> dict[str, float]:
    """When each node has everything. A stream sends, at its planned rate, the first chunk of its order that its parent
    has and it has not sent; in a ring a head listens to the learner first."""
    count = math.ceil(plan.size_bytes / plan.chunk_bytes)
    had: dict[str, set[int]] = defaultdict(set)
    places = [{number: place for place, number in enumerate(chunk_numbers(stream))} for stream in plan.streams]
    ready: list[list[tuple[int, int]]] = [[] for _ in plan.streams]
    busy = [False] * len(places)
    left = Counter({(s.parent, s.child): len(numbers) for s, numbers in zip(plan.streams, places, strict=True)})
    into, out = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    events: list[tuple[float, int, int, int]] = []
    done: dict[str, float] = {}

    def start(index: int, now: float) -> None:
        stream = plan.streams[index]
        learner_first = plan.topology is Topology.RING and stream.parent != SEED and left[SEED, stream.child]
        if ready[index] and not busy[index] and not learner_first:
            number = heapq.heappop(ready[index])[1]
            busy[index] = True
            left[stream.parent, stream.child] -= 1
            length = min(plan.chunk_bytes, plan.size_bytes - number * plan.chunk_bytes)
            end = now + length / stream.rate_bytes_per_s
            heapq.heappush(events, (end, 0, index, number))
            heapq.heappush(events, (end + LATENCY_S, 1, index, number))

    for index, stream in enumerate(plan.streams):
        into[stream.child].append(index)
        out[stream.parent].append(index)
        ready[index] = sorted((place, x) for x, place in places[index].items()) if stream.parent == SEED else []
        start(index, 0.0)
    while events:
        now, stored, index, number = heapq.heappop(events)
        child = plan.streams[index].child
        if not stored:
            busy[index] = False
            for other in into[child]:
                start(other, now)
            continue
        assert number not in had[child], "every chunk once"
        had[child].add(number)
        done[child] = now
        for other in out[child]:
            if number in places[other]:
                heapq.heappush(ready[other], (places[other][number], number))
                start(other, now)
    assert all(len(numbers) == count for numbers in had.values())
    return done


Made = tuple[list[Node], float, Plan]


@settings(deadline=None, max_examples=120)
@given(plans)
def test_played_chunk_by_chunk_everybody_gets_each_chunk_once_and_is_done_when_predicted(made: Made) -> None:
    """To within three chunks, which are not divided like water; who has two parents may be done sooner."""
    nodes, _, plan = made
    done = simulate(plan)
    chunk_s = plan.chunk_bytes / min(stream.rate_bytes_per_s for stream in plan.streams)
    assert set(done) == {node.node_id for node in nodes} == set(plan.predicted_s)
    for node, time in done.items():
        late_s = time - plan.predicted_s[node]
        assert late_s < 1e-3 * time + 3 * chunk_s
        assert late_s > -1e-3 * time - 3 * chunk_s or len(plan.streams) > len(nodes)


@settings(deadline=None, max_examples=150)
@given(plans)
def test_the_streams_of_a_node_are_a_partition_of_the_chunks(made: Made) -> None:
    nodes, _, plan = made
    for node in nodes:
        numbers = [x for stream in plan.streams if stream.child == node.node_id for x in chunk_numbers(stream)]
        assert sorted(numbers) == list(range(math.ceil(plan.size_bytes / plan.chunk_bytes)))


@settings(deadline=None, max_examples=150)
@given(plans)
def test_nobody_is_asked_for_more_than_it_can_carry(made: Made) -> None:
    nodes, uplink, plan = made
    sends, receives = defaultdict[str, float](float), defaultdict[str, float](float)
    for stream in plan.streams:
        sends[stream.parent] += stream.rate_bytes_per_s
        if plan.topology is Topology.RING:  # a head hears its tail after the learner
            receives[stream.child] = max(receives[stream.child], stream.rate_bytes_per_s)
        else:
            receives[stream.child] += stream.rate_bytes_per_s
    assert sends[SEED] <= uplink * (1 + 1e-9)
    for node in nodes:
        assert sends[node.node_id] <= node.up_bytes_per_s * (1 + 1e-9)
        assert receives[node.node_id] <= node.down_bytes_per_s * (1 + 1e-9)
        assert node.reachable or not sends[node.node_id]


@settings(deadline=None, max_examples=150)
@given(plans)
def test_no_prediction_is_below_the_bound(made: Made) -> None:
    _, _, plan = made
    assert plan.predicted_share_s >= plan.bound_s
    assert plan.predicted_all_s >= plan.bound_all_s >= plan.bound_s
    assert plan.predicted_all_s == max(plan.predicted_s.values())


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(Topology), fleets(), st.randoms(use_true_random=False))
def test_i10_the_same_fleet_gives_the_same_plan_in_any_order(
    topology: Topology, nodes: list[Node], random: random.Random
) -> None:
    shuffled = random.sample(nodes, len(nodes))
    first, second = (make_plan(topology, x, 300 * MBPS, 10**7, 65536, LATENCY_S, 1.1) for x in (nodes, shuffled))
    assert first == second


def fleet(*kinds: tuple[int, float, float, bool]) -> list[Node]:
    """(how many, up, down in Mbit/s, reachable); names are numbered through."""
    rates = [(up, down, reachable) for count, up, down, reachable in kinds for _ in range(count)]
    return [Node(f"w{k:02}", up * MBPS, down * MBPS, reachable) for k, (up, down, reachable) in enumerate(rates)]


def alike(count: int, mbps: float = 100.0) -> list[Node]:
    return fleet((count, mbps, mbps, True))


def plan_for(
    nodes: list[Node], uplink_mbps: float, topology: Topology = Topology.CHAIN, size_bytes: int = 256 * 2**20,
    chunk_bytes: int = 256 * 1024, gamma: float = 1.1, previous: tuple[tuple[str, ...], ...] = (),
) -> Plan:  # fmt: skip
    return make_plan(topology, nodes, uplink_mbps * MBPS, size_bytes, chunk_bytes, LATENCY_S, gamma, previous)


def children(plan: Plan, parent: str = SEED) -> list[str]:
    return list(dict.fromkeys(stream.child for stream in plan.streams if stream.parent == parent))


def ratio(plan: Plan) -> float:
    return plan.predicted_share_s / plan.bound_s


@pytest.mark.parametrize(
    ("uplink_mbps", "chains", "depth"), [(100, 1, 16), (300, 3, 6), (790, 8, 2), (800, 8, 2), (1600, 16, 1)]
)
def test_there_are_as_many_chains_as_the_uplink_feeds_at_the_workers_rate(
    uplink_mbps: float, chains: int, depth: int
) -> None:
    """A measured ratio of 7.9 is 8."""
    plan = plan_for(alike(16), uplink_mbps)
    assert plan.topology is Topology.CHAIN
    assert len(plan.chains) == len(children(plan)) == chains
    assert max(map(len, plan.chains)) == depth
    assert ratio(plan) < 1.04


@pytest.mark.parametrize(("uplink_mbps", "chains"), [(790, 8), (900, 8), (1000, 8), (1100, 11), (3100, 16)])
def test_no_chain_is_added_that_makes_none_shorter(uplink_mbps: float, chains: int) -> None:
    """32 workers in nine or ten chains stand four deep, as in eight."""
    plan = plan_for(alike(32), uplink_mbps)
    assert len(plan.chains) == chains
    assert max(map(len, plan.chains)) == -(-32 // chains)


def test_a_small_object_goes_through_one_chain_though_the_uplink_could_feed_more() -> None:
    plan = plan_for(alike(4), 10_000, size_bytes=2**19, chunk_bytes=65536)
    assert len([stream for stream in plan.streams if stream.parent == SEED]) == 1
    assert plan.predicted_all_s <= plan.bound_all_s + 0.2


def test_chains_start_at_stripes_of_their_own() -> None:
    plan = plan_for(alike(4), 200, size_bytes=8 * 2**22, chunk_bytes=2**22)
    orders = {stream.child: chunk_numbers(stream) for stream in plan.streams}
    assert orders["w00"] == orders["w02"] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert orders["w01"] == orders["w03"] == [4, 5, 6, 7, 0, 1, 2, 3]


def test_the_chain_is_as_quick_as_its_pipeline_and_the_star_as_slow_as_its_uplink() -> None:
    """By hand: G = 2^28 B at 12.5 MB/s takes 21.475 s; τ = 262144 / 12.5e6 + 0.02 = 0.041 s; 16/3 of G at the star."""
    chain, star = plan_for(alike(16), 300), plan_for(alike(16), 300, Topology.STAR)
    assert chain.bound_s == star.bound_s == pytest.approx(21.475, abs=1e-3)
    assert chain.predicted_all_s == pytest.approx(21.475 + 5 * 0.041 + 0.02, abs=1e-3)
    assert star.predicted_all_s == pytest.approx(21.475 * 16 / 3 + 0.02, abs=2e-3)
    assert {stream.parent for stream in star.streams} == {SEED}


def test_the_slow_stand_at_tails_and_hold_nobody_up() -> None:
    """Twelve at 100 Mbit/s and four at 30: at the heads they would cost the others a factor of three."""
    plan = plan_for(fleet((4, 30, 30, True), (12, 100, 100, True)), 400)
    slow = {"w00", "w01", "w02", "w03"}
    assert len(plan.chains) == 4
    assert {names[-1] for names in plan.chains} == slow
    assert max(plan.predicted_s[name] for name in plan.predicted_s if name not in slow) < 1.02 * 2**28 / (100 * MBPS)


def test_the_share_that_counts_does_not_wait_for_the_slowest() -> None:
    nodes = fleet((15, 100, 100, True), (1, 5, 5, True))
    plan = plan_for(nodes, 400)
    assert ratio(plan) < 1.02
    assert plan.predicted_all_s / plan.bound_all_s < 1.02
    assert plan.bound_all_s == pytest.approx(20 * plan.bound_s)


@pytest.mark.parametrize("topology", [Topology.CHAIN, Topology.TREE, Topology.RING])
def test_h11_nodes_that_cannot_be_dialled_feed_nobody_and_cost_nothing_at_the_tails(topology: Topology) -> None:
    plan = plan_for(fleet((4, 100, 100, False), (12, 200, 100, True)), 400, topology)
    assert plan.topology is topology
    assert not {stream.parent for stream in plan.streams} & {"w00", "w01", "w02", "w03"}
    assert ratio(plan) < 1.03


def test_more_nodes_than_tails_that_cannot_be_dialled_hang_on_the_seed() -> None:
    plan = plan_for(fleet((6, 100, 100, False), (4, 100, 100, True)), 200)
    assert sorted(map(len, plan.chains)) == [1, 1, 2, 2, 2, 2]
    assert len(children(plan)) == 6


@pytest.mark.parametrize("topology", list(Topology))
def test_a_fleet_that_nobody_can_dial_is_a_star(topology: Topology) -> None:
    plan = plan_for(fleet((5, 100, 100, False)), 800, topology)
    assert plan.topology is Topology.STAR
    assert len(children(plan)) == 5


def test_a_learner_slower_than_its_workers_feeds_a_tree() -> None:
    """B_0 = 50, u = 100: fan-out 2, so 16 workers are five deep."""
    plan = plan_for(alike(16), 50)
    assert plan.topology is Topology.TREE
    assert [len(children(plan, parent)) for parent in (SEED, "w00", "w01", "w15")] == [1, 2, 2, 0]
    assert ratio(plan) < 1.01


def test_a_tree_is_wider_for_an_object_so_small_that_depth_is_all_that_counts() -> None:
    small = plan_for(alike(64), 100, Topology.TREE, size_bytes=2**20, chunk_bytes=65536)
    assert len(children(small, "w00")) > 1
    assert small.predicted_share_s < plan_for(alike(64), 100, size_bytes=2**20, chunk_bytes=65536).predicted_share_s


def test_slow_uploads_are_helped_out_by_the_learners_spare_uplink() -> None:
    """10 Mbit/s up, 50 down, B_0 = 400, 16 workers: a chain alone would take 5 G/B_w, a star 2 G/B_w. By hand, with one
    chain: r = (400 + 15 · 10) / 16 = 34.4 Mbit/s against at most (400 + 160) / 16 = 35."""
    plan = plan_for(fleet((16, 10, 50, True)), 400)
    assert plan.predicted_all_s == pytest.approx(2**28 / (34.4 * MBPS), rel=0.02)
    assert plan.predicted_all_s < 1.05 * plan.bound_all_s
    assert ratio(plan) < 1.2
    head = [stream for stream in plan.streams if stream.child == plan.chains[0][0]]
    assert [(stream.parent, stream.stretches[0].step) for stream in head] == [(SEED, 1), (SEED, -1)]
    second = [stream for stream in plan.streams if stream.child == plan.chains[0][1]]
    assert [(stream.parent, stream.stretches[0].step) for stream in second] == [(plan.chains[0][0], 1), (SEED, -1)]


def test_a_ring_takes_each_byte_from_the_learner_once() -> None:
    plan = plan_for(alike(16), 800, Topology.RING)
    learner = [stream for stream in plan.streams if stream.parent == SEED]
    assert sorted(x for stream in learner for x in chunk_numbers(stream)) == list(range(1024))
    assert not any(stream.spills for stream in learner)
    assert max(Counter(stream.parent for stream in plan.streams if stream.parent != SEED).values()) == 1
    assert ratio(plan) < 1.02


def test_a_ring_leaves_out_the_one_that_would_slow_it_down() -> None:
    plan = plan_for(fleet((15, 120, 120, True), (1, 20, 20, True)), 400, Topology.RING)
    assert "w15" not in {stream.parent for stream in plan.streams}
    assert plan.predicted_share_s < 1.25 * plan.bound_s


def test_a_single_worker_and_no_worker_have_plans_too() -> None:
    for topology in Topology:
        assert children(plan_for(alike(1), 800, topology)) == ["w00"]
        assert plan_for([], 800, topology).streams == ()
        assert plan_for([], 800, topology).predicted_share_s == 0.0


def test_a_node_of_no_rate_is_last_and_arithmetic_goes_on() -> None:
    plan = plan_for([Node("a", 0.0, 0.0), *alike(3)], 100)
    assert plan.chains[0][-1] == "a"


# ---- plans that follow plans ---------------------------------------------------------------------------------------


def test_who_stays_keeps_its_place_when_others_come_and_go() -> None:
    before = plan_for(alike(16), 400)
    stayed = [node for node in alike(18) if node.node_id not in ("w05", "w10")]
    after = plan_for(stayed, 400, previous=before.chains)
    parents = {stream.child: stream.parent for stream in before.streams}
    moved = [s.child for s in after.streams if s.child in parents and parents[s.child] not in (s.parent, "w05", "w10")]
    assert not moved
    assert max(map(len, after.chains)) <= 5


def test_rates_measured_a_little_differently_change_nothing() -> None:
    before = plan_for(alike(16), 400)
    measured = [Node(f"w{k:02}", (95 + k % 7) * MBPS, (104 - k % 5) * MBPS) for k in range(16)]
    assert plan_for(measured, 400, previous=before.chains).chains == before.chains


def test_one_that_became_slow_moves_to_a_tail() -> None:
    before = plan_for(alike(16), 400)
    head = before.chains[2][0]
    measured = [node if node.node_id != head else Node(head, 30 * MBPS, 30 * MBPS) for node in alike(16)]
    assert plan_for(measured, 400, previous=before.chains).chains[2] == (*before.chains[2][1:], head)


def test_more_uplink_makes_more_chains_of_the_same_workers() -> None:
    before = plan_for(alike(16), 400)
    after = plan_for(alike(16), 800, previous=before.chains)
    assert [len(names) for names in after.chains] == [2] * 8
    assert [names[:1] for names in after.chains[:4]] == [names[:1] for names in before.chains]


def test_few_of_a_fleet_are_not_left_in_one_line() -> None:
    before = plan_for(alike(16), 400)
    few = [node for node in alike(16) if node.node_id in before.chains[0]]
    assert [len(names) for names in plan_for(few, 400, previous=before.chains).chains] == [1, 1, 1, 1]


def test_a_node_that_claims_an_absurd_rate_costs_no_memory() -> None:
    nodes = [Node("liar", 1e15, 1e7), *(Node(f"w{k}", 1e7, 1e7) for k in range(5))]
    plan = make_plan(Topology.TREE, nodes, 1e6, 2**26, 2**18, 0.02, 1.0)
    assert {stream.child for stream in plan.streams} == {node.node_id for node in nodes}


def test_a_ring_of_many_lines_keeps_to_what_a_frame_may_hold() -> None:
    plan = plan_for(alike(150, 10), 2000, Topology.RING)
    assert max(len(stream.stretches) for stream in plan.streams) <= MOST_STRETCHES
    assert max(len(stream.stretches) for stream in plan.streams) > MOST_STRETCHES / 2, "else this shows nothing"


@pytest.mark.parametrize("size_bytes", [10_000, 2**20, 2**28])
@pytest.mark.parametrize("reachable", [1, 2, 3])
def test_h11_few_that_can_be_dialled_among_many_that_cannot_are_planned_for(reachable: int, size_bytes: int) -> None:
    nodes = fleet((reachable, 100, 100, True), (30, 100, 100, False))
    plan = plan_for(nodes, 800, size_bytes=size_bytes, chunk_bytes=min(size_bytes, 256 * 1024))
    assert {stream.child for stream in plan.streams} == {node.node_id for node in nodes}

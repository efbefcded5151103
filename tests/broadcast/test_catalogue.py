from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.catalogue import Entry, anchor_due, cheapest_path, kept_entries
from echo2.types import Policy, SnapshotKind


def policy(version: int) -> Policy:
    return Policy(0, version)


def anchor(version: int, size_bytes: int = 1000) -> Entry:
    return Entry(policy(version), SnapshotKind.ANCHOR, None, f"anchor{version}", size_bytes, f"decoded{version}")


def delta(base: int, version: int, size_bytes: int = 10) -> Entry:
    name = f"delta{base}-{version}"
    return Entry(policy(version), SnapshotKind.DELTA, policy(base), name, size_bytes, f"decoded{version}")


def roots(path: list[Entry] | None) -> list[str]:
    assert path is not None
    return [entry.root for entry in path]


def adapters(version: int, size_bytes: int = 10) -> Entry:
    name = f"adapters{version}"
    return Entry(policy(version), SnapshotKind.DELTA, policy(0), name, size_bytes, f"decoded{version}", base_stays=True)


LADDER = [anchor(0), delta(0, 2), delta(2, 4), anchor(4), delta(4, 6)]


@pytest.mark.parametrize(
    ("held", "target", "path"),
    [
        ((), 0, ["anchor0"]),
        ((), 6, ["anchor4", "delta4-6"]),
        ((4,), 6, ["delta4-6"]),
        ((0,), 6, ["delta0-2", "delta2-4", "delta4-6"]),
        ((0, 2), 4, ["delta2-4"]),
        ((6,), 6, []),
        ((6,), 4, ["anchor0", "delta0-2", "delta2-4"]),
    ],
)
def test_the_way_with_the_fewest_bytes_is_taken(held: tuple[int, ...], target: int, path: list[str]) -> None:
    entries = [*LADDER[:3], anchor(4, 1200 if target == 4 else 1000), LADDER[4]]
    assert roots(cheapest_path(entries, policy(target), [policy(x) for x in held])) == path


def test_there_may_be_no_way() -> None:
    assert cheapest_path([delta(0, 2)], policy(2), ()) is None
    assert cheapest_path([], policy(2), [policy(0)]) is None


def test_bytes_that_are_here_already_cost_nothing() -> None:
    entries = [anchor(0), delta(0, 2, 600), anchor(2)]
    assert roots(cheapest_path(entries, policy(2), [policy(0)])) == ["delta0-2"]
    assert roots(cheapest_path(entries, policy(2), [policy(0)], {"anchor2": 500})) == ["anchor2"]


def test_of_equally_cheap_ways_the_shorter_is_taken() -> None:
    entries = [delta(0, 2, 5), delta(2, 4, 5), delta(0, 4, 10)]
    assert roots(cheapest_path(entries, policy(4), [policy(0)])) == ["delta0-4"]


def test_deltas_do_not_cross_into_another_history() -> None:
    rolled_back = Entry(Policy(1, 4), SnapshotKind.DELTA, Policy(0, 2), "again", 10, "decoded")
    entries = [*LADDER, rolled_back]
    assert roots(cheapest_path(entries, Policy(1, 4), [policy(2)])) == ["again"]
    assert roots(cheapest_path(entries, Policy(1, 4), [policy(4)])) == ["anchor0", "delta0-2", "again"]


sizes = st.integers(0, 50)
graphs = st.lists(
    st.one_of(
        st.builds(anchor, st.integers(0, 5), sizes),
        st.builds(lambda base, step, size: delta(base, base + step, size), st.integers(0, 4), st.integers(1, 3), sizes),
    ),
    max_size=8,
    unique_by=lambda entry: entry.root,
)


@given(graphs, st.integers(0, 6), st.sets(st.integers(0, 6), max_size=2))
def test_no_other_sequence_of_objects_is_cheaper(entries: list[Entry], target: int, held: set[int]) -> None:
    def leads(path: tuple[Entry, ...]) -> bool:
        starts = path[0].base is None or path[0].base.version in held
        return starts and path[-1].policy == policy(target) and all(b.base == a.policy for a, b in zip(path, path[1:]))  # noqa: B905, RUF007

    ways = [path for length in (1, 2, 3) for path in itertools.permutations(entries, length) if leads(path)]
    costs = [sum(entry.size_bytes for entry in path) for path in ways] + [0] * (target in held)
    path = cheapest_path(entries, policy(target), [policy(x) for x in held])
    if costs:
        assert path is not None and sum(entry.size_bytes for entry in path) <= min(costs)
    if path:
        assert leads(tuple(path))


def test_an_anchor_is_due_where_nobody_can_get_from_nothing() -> None:
    assert anchor_due([], policy(0), 8)
    assert anchor_due([delta(0, 2)], policy(2), 8)
    assert not anchor_due([anchor(0), delta(0, 2)], policy(2), 8)


def test_an_anchor_is_due_every_so_many_deltas() -> None:
    entries = [anchor(0), *(delta(k, k + 1) for k in range(8))]
    assert [anchor_due(entries, policy(k), 4) for k in range(9)] == [False] * 4 + [True] * 5


def test_an_anchor_is_due_when_the_deltas_after_the_last_weigh_as_much() -> None:
    assert not anchor_due([anchor(0), delta(0, 2, 600), delta(2, 4, 399)], policy(4), 8)
    assert anchor_due([anchor(0), delta(0, 2, 600), delta(2, 4, 400)], policy(4), 8)


def test_what_nobody_needs_any_more_is_not_kept() -> None:
    entries = [*LADDER, delta(6, 8)]
    assert roots(kept_entries(entries, [policy(8)])) == ["anchor4", "delta4-6", "delta6-8"]
    assert roots(kept_entries(entries, [policy(2), policy(8)])) == [
        "anchor0", "delta0-2", "anchor4", "delta4-6", "delta6-8",
    ]  # fmt: skip


@given(graphs, st.sets(st.integers(0, 6), max_size=3))
def test_what_is_kept_leads_to_every_kept_policy_that_could_be_had(entries: list[Entry], kept: set[int]) -> None:
    left = kept_entries(entries, [policy(x) for x in kept])
    for version in kept:
        assert cheapest_path(left, policy(version), ()) == cheapest_path(entries, policy(version), ())


def test_no_second_anchor_is_due_even_where_the_first_turned_out_larger_than_the_way_there_was() -> None:
    entries = [anchor(0), delta(0, 2, 1000)]
    assert anchor_due(entries, policy(2), 8)
    entries.append(anchor(2, 10**6))
    assert not anchor_due(entries, policy(2), 8)


FAN = [anchor(0), adapters(2), adapters(4), adapters(6)]


@pytest.mark.parametrize(("held", "path"), [((), ["anchor0", "adapters6"]), ((0, 4), ["adapters6"])])
def test_a_newcomer_takes_the_base_once_and_everybody_the_newest_adapters(
    held: tuple[int, ...], path: list[str]
) -> None:
    assert roots(cheapest_path(FAN, policy(6), [policy(x) for x in held])) == path


def test_of_adapters_the_newest_are_kept_with_their_base_and_what_is_asked_for() -> None:
    assert roots(kept_entries(FAN, [])) == ["anchor0", "adapters6"]
    assert roots(kept_entries(FAN, [policy(2)])) == ["anchor0", "adapters2", "adapters6"]


def test_beside_adapters_no_anchor_is_due_whatever_they_weigh() -> None:
    assert not anchor_due([anchor(0, 10), adapters(2, 10)], policy(2), anchor_every=1)
    assert anchor_due([adapters(2)], policy(2), anchor_every=1), "nobody gets there from nothing"

from __future__ import annotations

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.keeping import needed_roots
from echo2.types import Policy, SnapshotKind


def anchor(version: int, size: int = 1000) -> Entry:
    return Entry(Policy(0, version), SnapshotKind.ANCHOR, None, f"a{version}", size, f"d{version}")


def delta(base: int, version: int) -> Entry:
    return Entry(Policy(0, version), SnapshotKind.DELTA, Policy(0, base), f"{base}-{version}", 10, f"d{version}")


def policies(*versions: int) -> set[Policy]:
    return {Policy(0, version) for version in versions}


SHELF = [anchor(0), delta(0, 2), delta(2, 4), anchor(4), delta(4, 6)]


def test_the_newest_anchor_and_the_deltas_after_it_are_enough_for_newcomers() -> None:
    assert needed_roots(SHELF, policies(6), set(), set()) == {"a4", "4-6"}


def test_the_delta_into_an_anchored_version_stays_for_those_that_run_the_one_before() -> None:
    """The anchor is encoded while the delta is under way to everybody."""
    assert needed_roots(SHELF, policies(6), policies(2), set()) == {"2-4", "a4", "4-6"}
    assert needed_roots(SHELF[:4], policies(2, 4), set(), set()) >= {"2-4", "a4"}


def test_a_whole_snapshot_on_a_slow_line_stays_with_the_way_on_from_it() -> None:
    """Else it would be out of date before it arrived, again and again."""
    assert needed_roots(SHELF, policies(6), set(), {"a0"}) == {"a0", "0-2", "2-4", "a4", "4-6"}


def test_of_an_empty_shelf_nothing_is_needed() -> None:
    assert needed_roots([], policies(0), policies(0), {"a0"}) == set()

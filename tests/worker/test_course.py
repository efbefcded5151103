from __future__ import annotations

from echo2.simulation.snapshots import modelled_delta, modelled_snapshot
from echo2.types import Policy
from echo2.worker.course import Course, Leg

WHOLE = 1000


def anchor(version: int) -> Leg:
    return Leg(modelled_snapshot("run", Policy(0, version), "bfloat16", f"w{version}", WHOLE)[0], b"")


def delta(base: int, version: int, size: int = 100) -> Leg:
    old, _ = modelled_snapshot("run", Policy(0, base), "bfloat16", f"w{base}", WHOLE)
    new, data = modelled_snapshot("run", Policy(0, version), "bfloat16", f"w{version}", WHOLE)
    return Leg(modelled_delta(new, data, old, size)[0], b"")


def here(leg: Leg, nbytes: int) -> dict[str, int]:
    return {leg.manifest.object_root: nbytes}


def walk(course: Course) -> list[tuple[str, bool]]:
    """Versions reached on the rest of the way, and whether each is run."""
    reached = []
    while (leg := course.next) is not None:
        reached.append((str(leg.manifest.policy), course.arrive()))
    return reached


def test_only_the_end_of_a_way_is_run_and_stepping_stones_are_not() -> None:
    course = Course([anchor(0), delta(0, 2), delta(2, 4)])
    assert course.newest == Policy(0, 4)
    assert walk(course) == [("0.0", False), ("0.2", False), ("0.4", True)]


def test_an_object_that_the_newer_way_needs_too_is_brought_to_its_end() -> None:
    course = Course([delta(0, 2)])
    assert course.turn([delta(0, 2), delta(2, 4)], {})
    assert course.newest == Policy(0, 4)


def test_what_was_once_the_end_of_the_way_is_run_when_it_is_reached() -> None:
    """Else a worker that is slower than the learner publishes would walk for ever and run nothing."""
    course = Course([delta(0, 2)])
    for newer in (4, 6):
        course.turn([delta(0, 2), *(delta(v - 2, v) for v in range(4, newer + 1, 2))], {})
    assert walk(course) == [("0.2", True), ("0.4", True), ("0.6", True)]


def test_an_object_is_given_up_for_a_way_that_has_less_to_come_than_it_alone() -> None:
    course = Course([anchor(0)])
    assert not course.turn([delta(0, 2), delta(2, 4)], here(anchor(0), 700))
    assert walk(course) == [("0.2", False), ("0.4", True)]


def test_an_object_that_is_nearly_here_is_not_given_up_for_a_way_as_long() -> None:
    """A line on which a whole snapshot takes longer than from one anchor to the next would never get one."""
    course = Course([anchor(0), delta(0, 2, 900)])
    assert course.turn([anchor(4)], here(anchor(0), 1))
    assert course.newest == Policy(0, 4)
    assert walk(course) == [("0.0", True)], "it is run: from there the best way is asked for anew"


def test_an_object_that_is_gone_is_given_up_whatever_the_newer_way_costs() -> None:
    course = Course([delta(0, 2)])
    assert not course.turn([anchor(8)], {}, {delta(0, 2).manifest.object_root})
    assert walk(course) == [("0.8", True)]


def test_the_same_version_by_another_object_is_another_way() -> None:
    course = Course([anchor(2)])
    assert not course.turn([delta(0, 2), delta(2, 4)], {})
    assert walk(course) == [("0.2", True), ("0.4", True)]

"""Whether a client takes its answers (H01)."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from echo2.coordinator.connection import Uptake
from echo2.coordinator.limits import Limits

MB = 1 << 20


def stuck_s(looks: Iterable[tuple[int, int]]) -> float | None:
    """When a client is given up of whom this is seen, five seconds apart: bytes that wait, and that it took so far."""
    uptake = Uptake(Limits())
    for number, (waiting, acked) in enumerate(looks):
        if uptake.is_stuck(waiting, acked, 5.0 * number):
            return 5.0 * number
    return None


def test_h01_a_client_that_takes_nothing_is_stuck_after_the_stall_time() -> None:
    assert stuck_s([(MB, 3000)] * 100) == 20.0


def test_h01_a_client_that_takes_a_byte_now_and_then_is_stuck_too() -> None:
    assert stuck_s((MB, 3000 + number) for number in range(100)) == 25.0


@pytest.mark.parametrize("taken", [5 * 8_000, 5 * 500_000], ids=["64 kbit/s", "4 Mbit/s"])
def test_h01_a_client_that_reads_slowly_and_steadily_is_not_stuck(taken: int) -> None:
    assert stuck_s((MB, taken * number) for number in range(1000)) is None


def test_where_the_kernel_does_not_say_what_was_taken_what_waits_must_become_less() -> None:
    assert stuck_s((100 * MB - 40_000 * number, 0) for number in range(1000)) is None
    assert stuck_s([(MB, 0)] * 100) == 20.0


def test_nobody_is_stuck_while_nothing_waits_for_them() -> None:
    """A long poll, or an answer that fits into the kernel."""
    assert stuck_s([(0, 3000)] * 1000) is None
    assert stuck_s([(MB, 0), (MB, 0), (0, 0), (MB, 0), (MB, 0), (0, 0)] * 100) is None

"""Slow and steady passes, stalls and drips do not (H01)."""

from __future__ import annotations

import pytest

from echo2.transport.progress import SLOWEST_BYTES_PER_S, Progress

GRACE_S = 20.0


def given_up_s(arrivals: list[tuple[float, int]], size: int) -> float | None:
    """When a transfer of ``size`` whose bytes arrive so (seconds, bytes) is given up; None when it is not."""
    progress = Progress(GRACE_S, SLOWEST_BYTES_PER_S, 0.0)
    for at_s, nbytes in arrivals:
        if at_s > progress.due_s:
            return progress.due_s
        progress.moved(nbytes, at_s)
        size -= nbytes
    return progress.due_s if size > 0 else None


@pytest.mark.parametrize("kbit_per_s", [64, 4_000, 1_000_000])
@pytest.mark.parametrize("packet", [1400, 16 * 1024, 64 * 1024])
def test_h01_a_slow_and_steady_line_is_never_given_up(kbit_per_s: int, packet: int) -> None:
    size, rate = 16 << 20, kbit_per_s * 125
    arrivals = [(packet * (k + 1) / rate, packet) for k in range(size // packet + 1)]
    assert given_up_s(arrivals, size) is None


@pytest.mark.parametrize("size", [1000, 16 << 20, 64 << 20])
def test_h01_a_stall_is_given_up_after_the_grace_whatever_was_announced(size: int) -> None:
    assert given_up_s([], size) == GRACE_S
    assert given_up_s([(0.0, 1)], size) == pytest.approx(GRACE_S)


def test_h01_a_fast_beginning_buys_no_later_standstill() -> None:
    half, size = 8 << 20, 16 << 20
    assert given_up_s([(1.0, half)], size) == 1.0 + GRACE_S
    drips = [(1.0 + 9.0 * k, 1) for k in range(1, 1000)]
    assert given_up_s([(1.0, half), *drips], size) == pytest.approx(1.0 + GRACE_S, abs=0.1)


@pytest.mark.parametrize("every_s", [0.05, 1.0, 9.0])
def test_h01_dripping_byte_by_byte_is_given_up_soon(every_s: float) -> None:
    drips = [(every_s * k, 1) for k in range(1, 10_000)]
    ended_s = given_up_s(drips, 64 << 20)
    assert ended_s is not None
    assert ended_s < 1.1 * GRACE_S


def test_an_outage_shorter_than_the_grace_is_survived_again_and_again() -> None:
    """A line of 4 Mbit/s that is gone for fifteen seconds after every megabyte."""
    size = 16 << 20
    arrivals, at_s = [], 0.0
    for k in range(size // 50_000 + 1):
        at_s += 0.1 + (15.0 if k % 20 == 19 else 0.0)
        arrivals.append((at_s, 50_000))
    assert given_up_s(arrivals, size) is None

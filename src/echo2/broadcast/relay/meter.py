"""How fast bytes flow, from samples of a running total.

Invariant: a rate is the best two seconds of the newest transfer: neither pauses of the sender nor a lucky moment on a
shared line decide. It divides bytes by the time that passed between two samples, so samples taken late do not mislead;
and where it begins matters little, so that bytes held back behind a lost packet are not taken for speed. What is too
short to tell is not told. Pure.
"""

from __future__ import annotations

from collections import deque

WINDOW_S, LEAST_WINDOW_S = 2.0, 0.4
"""Transfers shorter than the first are judged by what they have, down to the second."""
MOMENT_S = 0.1
"""Within so long several heartbeats may come together."""
PAUSE_S = 0.3
"""A window with a longer pause in it says what was sent, not what could be."""
IDLE_S = 1.0
"""A pause that separates one transfer from the next."""
LEAST_BYTES = 256 * 1024
"""Transfers below this say nothing about a line."""
GAP_S = 0.3
"""Bytes behind a lost packet are counted all at once when that was sent again: a window that begins in the gap before
would see them, and none of the gap. So the slowest counts of those that begin within so long."""
QUIET_BYTES_PER_S = 16 * 1024
"""What heartbeats and reports may take on one connection: no transfer is so slow."""


def is_flow(gained_bytes: int, elapsed_s: float) -> bool:
    """Whether more went over a connection than what keeps it alive."""
    return gained_bytes > QUIET_BYTES_PER_S * max(elapsed_s, MOMENT_S)


class RateMeter:
    """Feed it totals several times per window."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()
        """(time, total) of the newest transfer, oldest first: what the window covers and one before."""
        self._began = 0
        """Total when the newest transfer began."""
        self._grew_s = self._steady_since_s = float("-inf")
        self._peak = self._short_peak = 0.0

    def sample(self, total_bytes: int, now: float) -> None:
        """``total_bytes`` have flowed since some beginning."""
        then, before = self._samples[-1] if self._samples else (now, total_bytes)
        grows = is_flow(total_bytes - before, now - then)
        if grows:
            if now - self._grew_s > IDLE_S:
                self._began, self._peak, self._short_peak = before, 0.0, 0.0
                self._samples = deque([self._samples[-1]])
            if now - self._grew_s > max(PAUSE_S, now - then):
                self._steady_since_s = then
            self._grew_s = now
        self._samples.append((now, total_bytes))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        if grows:
            self._short_peak = max(self._short_peak, self._rate_over(LEAST_WINDOW_S))
            self._peak = max(self._peak, self._rate_over(WINDOW_S))

    def _rate_over(self, window_s: float) -> float:
        """Of the newest ``window_s``, at least, or without its first moments where that is slower; 0 while there is
        less, or a pause in it."""
        now, total = self._samples[-1]
        began_s = max((then for then, _ in self._samples if now - then >= window_s), default=float("-inf"))
        if began_s < self._steady_since_s:
            return 0.0
        latest_s = min(began_s + GAP_S, now - window_s / 2)
        beginnings = (x for x in self._samples if began_s <= x[0] <= max(latest_s, began_s))
        return min((total - before) / (now - then) for then, before in beginnings)

    def peak_bytes_per_s(self) -> float:
        """Of the newest transfer; 0 while it is too short to tell."""
        if not self._samples or self._samples[-1][1] - self._began < LEAST_BYTES:
            return 0.0
        return self._peak or self._short_peak

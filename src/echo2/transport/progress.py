"""When a transfer has stopped being one.

Invariant (H01): a transfer may fall at most its grace behind the slowest rate that counts as progress, whatever its
size and however fast it was before. Who stalls or drips is given up within about that time; a line that is slow and
steady never is. Pure: time comes as a number.
"""

from __future__ import annotations

SLOWEST_BYTES_PER_S = 4 * 1024
"""Half of what a line of 64 kbit/s carries."""


class Progress:
    """One transfer."""

    def __init__(self, grace_s: float, slowest_bytes_per_s: float, now_s: float) -> None:
        self._grace_s = grace_s
        self._slowest_bytes_per_s = slowest_bytes_per_s
        self.due_s = now_s + grace_s
        """When it is to be given up, unless more came by then."""

    def moved(self, nbytes: int, now_s: float) -> float:
        """So much more came; returns the new ``due_s``. Speed is not saved up: it buys no later standstill."""
        self.due_s = min(self.due_s + nbytes / self._slowest_bytes_per_s, now_s + self._grace_s)
        return self.due_s

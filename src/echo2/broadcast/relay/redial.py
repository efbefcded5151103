"""When the seed is dialled again.

Invariant: the pause doubles from failure to failure, and no two nodes keep the same pauses, so those that lost the seed
together do not come back together (field report H09). A seed that answers and hangs up at once, because it has too many
connections perhaps, failed too. Pure.
"""

from __future__ import annotations

FIRST_S, MOST_S = 0.5, 10.0
"""The pause after a failure; it doubles from the first to the second."""
STEADY_S = 3.0
"""A connection that lasted for so long was one."""
GOLDEN = 0.6180339887498949
"""Multiples of it, without their whole parts, are spread evenly."""


class Redial:
    def __init__(self, life: int, now: float) -> None:
        """life: another number in every node, and every time it starts."""
        self._life = life
        self._pause_s = FIRST_S
        self._at_s = now
        self._failed_s = self._answered_s = float("-inf")
        self.rests = False
        """The seed is not to be dialled now."""

    def lost(self, now: float, brought: bool = False) -> None:
        """The link was there and is not any more.  brought: chunks came over it."""
        if not brought and now - self._answered_s < STEADY_S:
            self.failed(now)
        else:
            self._pause_s = FIRST_S
            self._rest(FIRST_S * self._jitter(), now)

    def failed(self, now: float) -> None:
        """To dial; failures of other connections during a pause do not make it longer."""
        if self._failed_s < self._answered_s <= now - STEADY_S:
            self._pause_s = FIRST_S
        if not self.rests:
            self._failed_s = now
            self._rest(self._pause_s * (1.0 + self._jitter()) / 2, now)
            self._pause_s = min(2 * self._pause_s, MOST_S)

    def answered(self, now: float) -> None:
        """A connection to it came about."""
        self._answered_s = now

    def due(self, now: float) -> bool:
        """Whether the seed may be dialled; the pause is over then."""
        self.rests = self.rests and now < self._at_s
        return not self.rests

    def _rest(self, seconds: float, now: float) -> None:
        self.rests, self._at_s = True, now + seconds

    def _jitter(self) -> float:
        """From 0 to 1."""
        self._life += 1
        return self._life * GOLDEN % 1.0

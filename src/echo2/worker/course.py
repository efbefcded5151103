"""The way from what a worker holds to the current policy, which may change while it is walked.

Invariant: an object under way is given up only when it is gone, or when the newest way does without it and has less to
come than the object alone (PROTOCOL §5). So what is still to come of the objects under way only falls, and a worker
whose line is slower than the learner publishes still gets somewhere. A version that was once the end of the way is run
when it is reached; versions that were only stepping stones are not. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from echo2.broadcast.manifest import Manifest


class Leg(msgspec.Struct, frozen=True):
    """One object of the way."""

    manifest: Manifest
    signed: bytes


class Course:
    def __init__(self, way: Sequence[Leg]) -> None:
        """way: at least one leg, in the order in which the objects apply."""
        self._way = list(way)
        self.newest = way[-1].manifest.policy
        """End of the newest way that was told."""
        self._goals = {self.newest}

    @property
    def next(self) -> Leg | None:
        """What is to be brought now; None at the end."""
        return self._way[0] if self._way else None

    def turn(self, way: Sequence[Leg], received: Mapping[str, int], gone: Collection[str] = ()) -> bool:
        """Hear of the newest way, to a newer policy; whether to go on with the object under way.

        received: bytes that are here of objects that are not whole, by root.  gone: roots of objects that are no longer
        to be had.
        """
        under_way = self._way[0]
        self.newest = way[-1].manifest.policy
        if under_way.manifest.object_root == way[0].manifest.object_root:
            self._take(way)
            return True
        if under_way.manifest.object_root in gone or _to_come(way, received) < _to_come([under_way], received):
            self._take(way)
            return False
        self._way = [under_way]  # To its end, and from there by whatever way is the best then.
        self._goals = {under_way.manifest.policy}
        return True

    def arrive(self) -> bool:
        """The next object is here and decoded; whether its version is to be run."""
        reached = self._way.pop(0).manifest.policy
        return reached in self._goals

    def _take(self, way: Sequence[Leg]) -> None:
        self._way = list(way)
        self._goals = {leg.manifest.policy for leg in way if leg.manifest.policy in self._goals} | {self.newest}


def _to_come(way: Sequence[Leg], received: Mapping[str, int]) -> int:
    return sum(leg.manifest.object_size - received.get(leg.manifest.object_root, 0) for leg in way)

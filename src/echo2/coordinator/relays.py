"""What is known of the workers' relays, by worker. Pure vocabulary between the seed and the picture of the run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec


class RelayStanding(msgspec.Struct, frozen=True):
    """A worker's relay as the coordinator's own relay told of it last."""

    reachable: bool | None = None
    """Whether others can dial it; None while that is not known, and when it is not connected."""
    sent_bytes: int = 0
    """To others, since it started."""
    reparentings: int = 0
    """Times it turned to another parent, since it started."""
    fed_by: str = ""
    """By plan: a worker's id, or ``SEED`` for the coordinator; empty for nobody yet."""


Standings = Callable[[], Mapping[str, RelayStanding]]
"""By worker id; a worker whose relay never came is not in it."""

UNKNOWN = RelayStanding()


def no_relays() -> Mapping[str, RelayStanding]:
    """Of a run without relays."""
    return {}

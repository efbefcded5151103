"""A worker whose engine runs the learner's own weights: nothing is brought, the version moves by itself.

Invariant (I5): the version told to the coordinator is the one that the engine's owner settled, after every token of the
one before it was sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from echo2.ports import EventLog
from echo2.rollout.engine import Engine
from echo2.transport.patience import Recall
from echo2.types import Policy


class ResidentEngine(Engine, Protocol):
    """An engine whose weights somebody else switches."""

    async def settled(self, after: Policy | None) -> Policy:
        """Wait until the installed policy is newer than ``after``; which it is."""
        ...


class Residence:
    """Stands where another worker has its ``Installer``."""

    activity = ""
    """For people; nothing here takes time."""

    def __init__(self, engine: ResidentEngine, drain: Recall, events: EventLog, on_install: Callable[[], None]) -> None:
        self._engine = engine
        self._drain = drain
        self._events = events
        self._on_install = on_install

    async def run(self) -> None:
        """Consumes the owner's versions; waits for a newer one; produces news of it; ends by drain.

        The wait has no deadline of its own: a version takes a training step, whose parts are bounded.
        """
        known: Policy | None = None
        while not self._drain.called:
            known = await self._drain.within(None, "a version of the learner", self._engine.settled(known))
            if known is not None:
                self._events.emit("installed", policy=str(known))
                self._on_install()

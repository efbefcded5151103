"""What rank 0 of a learner tells the other ranks to do with it.

Invariant: the two lines, steps and publishes, each carry one command at a time, and a command is done before the next
is sent. While there is nothing to do, ``Wait`` says so often enough that no rank takes the silence for a death.
"""

from __future__ import annotations

import msgspec

from echo2.transport.messages import BatchReply


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Nothing to do yet."""


class Open(msgspec.Struct, frozen=True, tag=True):
    """Load the run's newest checkpoint, or make version 0."""

    run_id: str


class Audit(msgspec.Struct, frozen=True, tag=True):
    batch: BatchReply


class Train(msgspec.Struct, frozen=True, tag=True):
    batch: BatchReply


class Freeze(msgspec.Struct, frozen=True, tag=True):
    """Copy the current step under this number."""

    number: int


class Save(msgspec.Struct, frozen=True, tag=True):
    number: int


class Serve(msgspec.Struct, frozen=True, tag=True):
    """Give rank 0 the rows it asks for of a frozen step."""

    number: int


class Forget(msgspec.Struct, frozen=True, tag=True):
    """These frozen steps are not needed any more."""

    numbers: tuple[int, ...]


class End(msgspec.Struct, frozen=True, tag=True):
    """Leave: nothing more will come."""


StepCommand = Wait | Open | Audit | Train | Freeze | End
PublishCommand = Wait | Save | Serve | Forget | End
Command = StepCommand | PublishCommand

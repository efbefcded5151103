"""One error model.

    Echo2Error
    ├── UserError            the user's input is wrong: exit 2, one sentence, never a traceback
    │   ├── ConfigError      …in the configuration; may carry several sentences, one per fault
    │   └── TaskFault        …in a task's own code; in a run it fails a row, which is no zero reward (I4)
    ├── IntegrityError       bytes do not match what was signed or hashed (I6)
    ├── TransportError       the other side could not be reached or did not answer in time; retried by clients
    ├── DiskFull             no room for the bytes; what was there before is whole; worth retrying once space is free
    ├── Refused              the other side answered no, with a reason; not retried
    │   ├── Malformed        what was sent cannot be read: unknown message, wrong fields, over a size limit
    │   ├── Unauthorised     wrong, expired or revoked credential
    │   │   └── SetAside     this worker's work is not taken any more, with the reason
    │   └── Fenced           a newer learner attached; this one must exit
    ├── EngineError          generation failed; becomes a row status, not a zero reward (I4)
    └── Starved              a wait passed its deadline; says what it waited for (I7)

Messages say what must hold, what was got, and what to change.
"""

from __future__ import annotations


class Echo2Error(Exception):
    """Root of every error this package raises on purpose."""


class UserError(Echo2Error):
    """The user's input is wrong."""


class ConfigError(UserError):
    """One or more faults in a configuration, each a sentence."""

    def __init__(self, faults: list[str] | str) -> None:
        self.faults = [faults] if isinstance(faults, str) else list(faults)
        super().__init__("; ".join(self.faults))


class TaskFault(UserError):
    """A task raised, or gave something else than it must."""


class IntegrityError(Echo2Error):
    """Bytes differ from their signed or hashed description."""


class TransportError(Echo2Error):
    """No answer in time; worth retrying."""


class DiskFull(Echo2Error):
    """The disk has no room; the previous state is whole."""


class Refused(Echo2Error):
    """The other side answered no."""


class Malformed(Refused):
    """What was sent cannot be read."""


class Unauthorised(Refused):
    """The credential is wrong, expired or revoked."""


class SetAside(Unauthorised):
    """The run takes no more of this worker's work (PROTOCOL §8)."""


class Fenced(Refused):
    """A newer learner has attached (PROTOCOL §2)."""


class EngineError(Echo2Error):
    """The engine could not generate."""


class Starved(Echo2Error):
    """A wait passed its deadline."""


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error of a task group that people should read: the first of ours, else the first of all."""
    leaves: list[BaseException] = []
    open_groups: list[BaseException] = [group]
    while open_groups:
        error = open_groups.pop(0)
        if isinstance(error, BaseExceptionGroup):
            open_groups = [*error.exceptions, *open_groups]
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if isinstance(leaf, Echo2Error)), leaves[0])

"""Which loop is starved, in one sentence, instead of a hang.

Invariant (I7): whoever waits has a deadline; past it the run ends and names who owes what to whom. Pure.
"""

from __future__ import annotations

import msgspec

from echo2.transport.messages import MAX_WAIT_S

LEARNER_PATIENCE = 10.0
"""A learner that holds a batch is given so many step times."""
FIRST_STEP_PATIENCE = 6.0
"""…and, before a step time is known, so many stall times: compilation and cold caches make the first step long."""
ASKING_S = 4 * MAX_WAIT_S
"""A learner that waits asks at least so often; one that asked and then fell silent is looked for itself."""


class Progress(msgspec.Struct, frozen=True):
    """Ages in seconds of the last sign of each kind of progress."""

    rows_s: float
    """Since a row was accepted, the learner took a batch, or a lease was granted while leases bear fruit."""
    learner_s: float
    """Since the learner attached, asked, or reported."""
    learner_attached: bool
    learner_waits: bool
    published: bool
    workers_active: int
    batch: str
    """What the learner's next batch lacks."""
    t_train_s: float | None
    set_aside: str = ""
    """Name and reason of the last worker that was set aside; empty where none was."""


def starved(progress: Progress, stall_s: float) -> str | None:
    """The sentence that ends the run, or None while everybody is within their time."""
    if not progress.learner_attached or not progress.published:
        if progress.learner_s > stall_s:
            missing = "published version 0" if progress.learner_attached else "attached"
            return f"no learner has {missing} for {progress.learner_s:.0f} s: look at the learner's log"
        return None
    if progress.learner_waits and progress.learner_s <= ASKING_S:
        if progress.rows_s <= stall_s:
            return None
        who = "no worker is alive" if not progress.workers_active else f"{progress.workers_active} workers are alive"
        if progress.set_aside and not progress.workers_active:
            who += f"; the last one that was set aside is {progress.set_aside}"
        return (
            f"no trajectory was accepted for {progress.rows_s:.0f} s while the learner waits: {progress.batch}; {who}"
        )
    patience = LEARNER_PATIENCE * progress.t_train_s if progress.t_train_s else FIRST_STEP_PATIENCE * stall_s
    if progress.learner_s > max(stall_s, patience):
        what = "been silent since it asked for a batch" if progress.learner_waits else "held a batch"
        return f"the learner has {what} for {progress.learner_s:.0f} s without a report: look at the learner's log"
    return None

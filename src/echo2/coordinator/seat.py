"""Who the learner is, and what it may do next.

Invariant: at most one learner acts at a time. Each attach gets a higher fencing epoch; anything said under an older
one is refused, so a learner that was thought dead can do no harm (PROTOCOL §2).
"""

from __future__ import annotations

from echo2.coordinator.history import RunState
from echo2.data.buffer import Buffer
from echo2.errors import Fenced, Refused
from echo2.transport.messages import Attach


def check_epoch(state: RunState, epoch: int) -> None:
    if epoch != state.epoch:
        raise Fenced(f"epoch must be {state.epoch}, got {epoch}: a newer learner has attached, this one must exit")


def check_attach(state: RunState, attach: Attach, buffer: Buffer, may_roll_back: bool) -> bool:
    """Whether attaching means a rollback below a known version. Raises Refused when it may not attach at all.

    Published versions are promised to stay; one that only the learner's own engine ran went with its process.
    """
    if attach.run_id != state.run_id:
        raise Refused(f"the learner belongs to run {attach.run_id}, this coordinator serves {state.run_id}")
    if state.initial_weights_hash not in ("", attach.initial_weights_hash):
        raise Refused("the learner started from other initial weights than this run: point it at the run's model")
    if attach.step > state.steps_reported:
        raise Refused(
            f"the learner holds {attach.step} training steps, the coordinator's store only {state.steps_reported}: "
            "restore the store that belongs to this checkpoint, or start a new run"
        )
    last = buffer.batches.get(attach.step - 1)
    if last is not None and last.digest != attach.last_batch_digest:
        raise Refused(f"the learner's last batch differs from batch {attach.step - 1} of this store: another history")
    newest = state.current
    breaks_promise = newest is not None and attach.step < newest.version
    below = any(attach.step < policy.version for policy in state.known[-1:])
    if breaks_promise and not (attach.rollback or may_roll_back):
        raise Refused(
            f"the learner resumes at step {attach.step}, below published version {newest}: restore its newest "
            "checkpoint, or ask for a rollback explicitly"
        )
    if not below and buffer.records_from > attach.step < state.steps_reported:
        raise Refused(f"batches from {attach.step} on are no longer kept for a replay: resume at a newer checkpoint")
    return below


def publish_due(step: int, publish_period: int, steps: int, stopping: bool) -> bool:
    """Whether the version after batch ``step`` is published: every kappa steps, and at the end of the run."""
    version = step + 1
    return version % publish_period == 0 or version >= steps or stopping

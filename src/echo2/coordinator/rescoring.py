"""Rewards scored again, beside everything else that the coordinator does.

Invariant: a worker is set aside for a difference that was found twice, and for nothing else: what cannot be scored
here, or scores differently each time it is scored, is evidence of nothing. Nobody waits for this loop: leases,
admission and training go on as if it were not there, and what it finds costs the worker what lies in the buffer.
"""

from __future__ import annotations

from typing import Protocol

from echo2.coordinator.hall import Hall
from echo2.data.rescoring import Claim
from echo2.data.task import Score, Task
from echo2.errors import Echo2Error
from echo2.transport.messages import MAX_WAIT_S
from echo2.types import Prompt


class NoScore(Echo2Error):
    """A reply could not be scored again; ``for_good``: nor will any other be."""

    def __init__(self, reason: str, for_good: bool = False) -> None:
        super().__init__(reason)
        self.for_good = for_good


class Scorer(Protocol):
    """Scores replies where nothing else is held up."""

    async def score(self, prompt: Prompt, reply: bytes) -> Score:
        """reply: [L] uint32 token ids, as sampled. Raises NoScore; always ends within a stated time."""
        ...


async def keep_rescoring(hall: Hall, scorer: Scorer) -> None:
    """Consumes claims; waits for one; unblocked by a submission; produces counts, and workers that are set aside."""
    while True:
        claim = hall.books.docket.take()
        if claim is None:
            await hall.claims.wait(MAX_WAIT_S)
        else:
            await _look_at(claim, hall, scorer)


async def _look_at(claim: Claim, hall: Hall, scorer: Scorer) -> None:
    state, task = hall.books.state, hall.books.docket.tasks[claim.prompt.task]
    try:
        ours = await scorer.score(claim.prompt, claim.reply)
        agrees = _same(task, ours, claim.score)
        again = ours if agrees else await scorer.score(claim.prompt, claim.reply)
        is_repeatable = _same(task, again, ours)
    except NoScore as error:
        if error.for_good:
            hall.books.docket.close()
            hall.events.emit("rescoring_off", reason=str(error))
            return
        state.rescoring_failed += 1
        hall.events.emit("rescoring_failed", **_place(claim), error=str(error))
        return
    if not is_repeatable:
        hall.books.docket.forget_task(claim.prompt.task)
        hall.events.emit("score_not_repeatable", **_place(claim), first=ours.reward, second=again.reward)
        return
    state.rescored += 1
    if agrees:
        return
    state.rescored_differing += 1
    told, found = _told(claim.score), _told(ours)
    hall.events.emit("reward_differs", **_place(claim), told=told, found=found)
    await hall.set_aside(
        claim.worker_id, f"it sent the reward {told} for a reply to {claim.prompt.prompt_id} that scores {found} here"
    )


def _same(task: Task, ours: Score, theirs: Score) -> bool:
    """Raises NoScore."""
    try:
        return task.agrees(ours, theirs)
    except Exception as error:  # a task is people's own code, and this loop must go on
        raise NoScore(f"its task could not compare two scores: {type(error).__name__}: {error}") from error


def _told(score: Score) -> str:
    return f"{score.reward:g} ({score.status[:40]})"


def _place(claim: Claim) -> dict[str, str | int]:
    return {
        "worker": claim.worker_id,
        "lease": claim.lease_id,
        "index": claim.index,
        "task": claim.prompt.task,
        "prompt": claim.prompt.prompt_id,
    }

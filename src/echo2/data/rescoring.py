"""Rewards that are scored again: which, and what was claimed of them.

Invariant: what is drawn follows from a secret that no worker knows, so nobody can be honest in those replies alone.
What waits is bounded; what has no place is passed over, and counts neither for nor against anybody. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import msgspec
from blake3 import blake3

from echo2.data.task import Score, Task
from echo2.transport.messages import SubmitGroup
from echo2.types import Prompt, Trajectory, Verdict

MOST_WAITING = 256
MOST_WAITING_BYTES = 16 * 1024 * 1024
"""Of the replies' token ids."""

_records = msgspec.msgpack.Decoder(Trajectory)


class Claim(msgspec.Struct, frozen=True):
    """What a worker says that a reply is worth."""

    worker_id: str
    lease_id: str
    index: int
    prompt: Prompt
    """As it was leased, not as the worker sent it back."""
    reply: bytes
    """[L] uint32, every token that the policy sampled."""
    score: Score


def is_verifiable(task: Task) -> bool:
    """Whether rewards are scored again: of single replies, unless the task says otherwise, and not of whole games."""
    return task.verifiable and type(task).rollout is Task.rollout


def is_drawn(secret: str, lease_id: str, index: int, share: float) -> bool:
    drawn = blake3(f"{secret}/{lease_id}/{index}".encode()).digest()[:8]
    return int.from_bytes(drawn, "little") < share * 2**64


class Docket:
    """Claims that wait to be looked at, oldest first."""

    def __init__(self, tasks: Mapping[str, Task], share: float, secret: str) -> None:
        """tasks: those of the run, by name; the ones that cannot be verified are passed over."""
        self.tasks = {name: task for name, task in tasks.items() if is_verifiable(task)}
        self.share = share
        self._secret = secret
        self._claims: deque[Claim] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._claims)

    def put(self, worker_id: str, prompt: Prompt, submission: SubmitGroup, verdicts: Sequence[Verdict]) -> None:
        """Draw from the rows of a submission that were just accepted."""
        if prompt.task not in self.tasks or not self.share:
            return
        lease_id = submission.lease_id
        for row, verdict in zip(submission.rows, verdicts, strict=True):
            if verdict is not Verdict.ACCEPTED or not is_drawn(self._secret, lease_id, row.index, self.share):
                continue
            record = _records.decode(row.record)
            reply = b"".join(segment.token_ids for segment in record.segments if segment.sampled)
            if len(self._claims) < MOST_WAITING and self._bytes + len(reply) <= MOST_WAITING_BYTES:
                score = Score(record.reward, str(record.omega.get("status", "")))
                self._claims.append(Claim(worker_id, lease_id, row.index, prompt, reply, score))
                self._bytes += len(reply)

    def take(self) -> Claim | None:
        if not self._claims:
            return None
        claim = self._claims.popleft()
        self._bytes -= len(claim.reply)
        return claim

    def close(self) -> None:
        """Nothing is scored again from now on."""
        self.share = 0.0
        self._keep([])

    def forget_worker(self, worker_id: str) -> None:
        self._keep([claim for claim in self._claims if claim.worker_id != worker_id])

    def forget_task(self, name: str) -> None:
        """Its scores turned out to depend on more than prompt and reply."""
        self.tasks.pop(name, None)
        self._keep([claim for claim in self._claims if claim.prompt.task != name])

    def _keep(self, claims: list[Claim]) -> None:
        self._claims = deque(claims)
        self._bytes = sum(len(claim.reply) for claim in claims)

"""Small records for tests: trajectories, submissions and a task that needs no model."""

from __future__ import annotations

import msgspec

from echo2.transport.messages import RowSubmission
from echo2.types import (
    LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
    FinishReason,
    Policy,
    Prompt,
    RowStatus,
    Segment,
    Trajectory,
    pack_logprobs,
    pack_tokens,
)


def prompt(number: int = 0, task: str = "toy") -> Prompt:
    return Prompt(prompt_id=f"p{number}", task=task, content={"question": f"{number}+1", "answer": str(number + 1)})


def trajectory(
    about: Prompt,
    policy: Policy | int = 0,
    reward: float = 1.0,
    *,
    newest: Policy | int | None = None,
    reply: tuple[int, ...] = (7, 8, 2),
    finish_reason: FinishReason = FinishReason.STOP,
) -> Trajectory:
    oldest = policy if isinstance(policy, Policy) else Policy(0, policy)
    last = oldest if newest is None else newest if isinstance(newest, Policy) else Policy(0, newest)
    return Trajectory(
        task=about.task,
        prompt_id=about.prompt_id,
        segments=(
            Segment(pack_tokens([1, 5, 6]), sampled=False),
            Segment(
                pack_tokens(reply),
                sampled=True,
                logprobs=pack_logprobs([-0.5] * len(reply)),
                versions=None if oldest == last else pack_tokens([oldest.version, *[last.version] * (len(reply) - 1)]),
            ),
        ),
        reward=reward,
        policy_min=oldest,
        policy_max=last,
        finish_reason=finish_reason,
        logprob_convention=LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
    )


def row(index: int, record: Trajectory | bytes) -> RowSubmission:
    raw = record if isinstance(record, bytes) else msgspec.msgpack.encode(record)
    return RowSubmission(index, RowStatus.FINISHED, record=msgspec.Raw(raw))


def failed_row(index: int, status: RowStatus = RowStatus.ERROR) -> RowSubmission:
    return RowSubmission(index, status, error="engine fell over")


def rows(about: Prompt, policy: Policy | int = 0, rewards: tuple[float, ...] = (1.0, 0.0)) -> list[RowSubmission]:
    return [row(index, trajectory(about, policy, reward)) for index, reward in enumerate(rewards)]

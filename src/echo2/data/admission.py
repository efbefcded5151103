"""Is a submitted record what it must be? Checked before it costs more than its own bytes.

Invariant (I8, I9): an admitted record has, for every sampled token, an id and, where it has any, a log-prob; where
several versions sampled it, it says which sampled each token; its reward is a finite number; and it is about the prompt
that was leased, drawn as the lease asked. What a record says of its own sampling is not believed: a worker that could
choose it would choose what its log-probs are compared with.
"""

from __future__ import annotations

import msgspec

from echo2.types import LARGEST_LOGPROB, SMALLEST_LOGPROB, Prompt, Segment, Trajectory

MAX_REWARD = 1e9
"""Sums over a batch, and squares in float32, stay finite."""

_decoder = msgspec.msgpack.Decoder(Trajectory)


class Asked(msgspec.Struct, frozen=True):
    """How the run's leases ask for tokens to be drawn."""

    temperature: float = 1.0
    top_p: float = 1.0


def parse_record(raw: bytes, prompt: Prompt, asked: Asked = Asked()) -> Trajectory | str:  # noqa: B008 - immutable
    """The trajectory, or the fault that makes it malformed."""
    try:
        trajectory = _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        return f"not a trajectory: {error}"
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        return f"not a trajectory: {type(error).__name__}"
    return fault(trajectory, prompt, asked) or trajectory


def fault(trajectory: Trajectory, prompt: Prompt, asked: Asked) -> str | None:
    """What is wrong with a trajectory for ``prompt``; None when nothing is."""
    if (trajectory.task, trajectory.prompt_id) != (prompt.task, prompt.prompt_id):
        leased = f"{prompt.task}/{prompt.prompt_id}"
        return f"record is about {trajectory.task}/{trajectory.prompt_id}, the lease about {leased}"
    if not abs(trajectory.reward) <= MAX_REWARD:
        return f"reward must be in [-{MAX_REWARD:g}, {MAX_REWARD:g}], got {trajectory.reward}"
    if (trajectory.temperature, trajectory.top_p) != (asked.temperature, asked.top_p):
        said = f"temperature {trajectory.temperature:g} and top_p {trajectory.top_p:g}"
        return f"the lease asks for temperature {asked.temperature:g} and top_p {asked.top_p:g}, the record has {said}"
    if trajectory.policy_min > trajectory.policy_max:
        return f"policy span {trajectory.policy_min}..{trajectory.policy_max} is reversed"
    if trajectory.sampled_tokens == 0:
        return "no token was sampled by the policy"
    for segment in trajectory.segments:
        if found := _segment_fault(segment) or _version_fault(segment, trajectory):
            return found
    return None


def _segment_fault(segment: Segment) -> str | None:
    count, rest = divmod(len(segment.token_ids), 4)
    if rest:
        return f"token ids must be packed uint32, got {len(segment.token_ids)} bytes"
    for name, packed in (("log-probs", segment.logprobs), ("versions", segment.versions)):
        if packed is not None and (not segment.sampled or len(packed) != 4 * count):
            return f"{name} must match the {count} sampled tokens, got {len(packed) / 4:g}"
    values = segment.logprob_values
    if values is not None and count and not SMALLEST_LOGPROB < values.min() <= values.max() <= LARGEST_LOGPROB:
        return f"log-probs must be in ({SMALLEST_LOGPROB:g}, 0], got {values.min():g} to {values.max():g}"  # or NaN
    return None


def _version_fault(segment: Segment, trajectory: Trajectory) -> str | None:
    oldest, newest = trajectory.policy_min, trajectory.policy_max
    versions = segment.version_values
    if versions is None:
        return "tokens of several versions must say which" if segment.sampled and oldest != newest else None
    # Across a rollback a version says nothing of its incarnation.
    if oldest.incarnation == newest.incarnation and len(versions):
        first, last = int(versions.min()), int(versions.max())
        if not oldest.version <= first <= last <= newest.version:
            return f"tokens of versions {first} to {last} in a record of {oldest} to {newest}"
    return None

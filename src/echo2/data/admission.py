"""Is a submitted record what it must be? Checked before it costs more than its own bytes.

Invariant (I8, I9): an admitted record has, for every sampled token, an id and, where it has any, a log-prob and a
version; its reward is a finite number; and it is about the prompt that was leased.
"""

from __future__ import annotations

import msgspec

from echo2.types import Prompt, Segment, Trajectory

MAX_REWARD = 1e9
"""Sums over a batch, and squares in float32, stay finite."""
TEMPERATURES = (1e-6, 1e6)
"""Logits are divided by it: beyond, they overflow or vanish."""

_decoder = msgspec.msgpack.Decoder(Trajectory)


def parse_record(raw: bytes, prompt: Prompt) -> Trajectory | str:
    """The trajectory, or the fault that makes it malformed."""
    try:
        trajectory = _decoder.decode(raw)
    except msgspec.MsgspecError as error:
        return f"not a trajectory: {error}"
    except (UnicodeDecodeError, RecursionError, ValueError) as error:
        return f"not a trajectory: {type(error).__name__}"
    return fault(trajectory, prompt) or trajectory


def fault(trajectory: Trajectory, prompt: Prompt) -> str | None:
    """What is wrong with a trajectory for ``prompt``; None when nothing is."""
    if (trajectory.task, trajectory.prompt_id) != (prompt.task, prompt.prompt_id):
        leased = f"{prompt.task}/{prompt.prompt_id}"
        return f"record is about {trajectory.task}/{trajectory.prompt_id}, the lease about {leased}"
    if not abs(trajectory.reward) <= MAX_REWARD:
        return f"reward must be in [-{MAX_REWARD:g}, {MAX_REWARD:g}], got {trajectory.reward}"
    coldest, hottest = TEMPERATURES
    if not (coldest <= trajectory.temperature <= hottest and 0 < trajectory.top_p <= 1):
        return f"temperature must be in [{coldest:g}, {hottest:g}] and top_p in (0, 1]"
    if trajectory.policy_min > trajectory.policy_max:
        return f"policy span {trajectory.policy_min}..{trajectory.policy_max} is reversed"
    if trajectory.sampled_tokens == 0:
        return "no token was sampled by the policy"
    return next((found for segment in trajectory.segments if (found := _segment_fault(segment))), None)


def _segment_fault(segment: Segment) -> str | None:
    count, rest = divmod(len(segment.token_ids), 4)
    if rest:
        return f"token ids must be packed uint32, got {len(segment.token_ids)} bytes"
    for name, packed in (("log-probs", segment.logprobs), ("versions", segment.versions)):
        if packed is not None and (not segment.sampled or len(packed) != 4 * count):
            return f"{name} must match the {count} sampled tokens, got {len(packed) / 4:g}"
    values = segment.logprob_values
    if values is not None and count and not values.max() <= 1e-3:  # NaN is not, either
        return "log-probs must be at most 0 and not NaN"
    return None

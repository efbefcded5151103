"""What a worker sends is checked before anything is computed from it (I8, I9)."""

from __future__ import annotations

import math
import statistics

import msgspec
import pytest
from building import prompt, trajectory

from echo2.data.admission import MAX_REWARD, parse_record
from echo2.types import Policy, Trajectory

ABOUT = prompt()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1e308, math.nextafter(MAX_REWARD, math.inf)])
def test_a_reward_that_would_break_a_mean_is_malformed(reward: float) -> None:
    assert "reward must be in" in str(parse_record(msgspec.msgpack.encode(trajectory(ABOUT, reward=reward)), ABOUT))


def test_the_largest_reward_is_admitted_and_can_be_averaged() -> None:
    record = parse_record(msgspec.msgpack.encode(trajectory(ABOUT, reward=MAX_REWARD)), ABOUT)
    assert isinstance(record, Trajectory)
    assert statistics.fmean([record.reward] * 100_000) == MAX_REWARD


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 0.0, -1.0, 1e-300, 1e300])
def test_a_temperature_that_no_logits_survive_is_malformed(temperature: float) -> None:
    record = msgspec.structs.replace(trajectory(ABOUT), temperature=temperature)
    assert "temperature must be in" in str(parse_record(msgspec.msgpack.encode(record), ABOUT))


@pytest.mark.parametrize("policy", [Policy(-1, 0), Policy(0, -1), Policy(0, 2**53), Policy(2**64 - 1, 0)])
def test_a_policy_is_two_numbers_that_every_reader_holds_exactly(policy: Policy) -> None:
    record = msgspec.msgpack.encode(trajectory(ABOUT, policy, newest=Policy(0, 3)))
    assert "not a trajectory" in str(parse_record(record, ABOUT))

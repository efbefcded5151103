"""What a worker sends is checked before anything is computed from it (I8, I9)."""

from __future__ import annotations

import math
import statistics

import msgspec
import pytest
from building import prompt, trajectory

from echo2.data.admission import MAX_REWARD, Asked, parse_record
from echo2.types import Policy, Trajectory, pack_logprobs, pack_tokens

ABOUT = prompt()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e308, -1e308, math.nextafter(MAX_REWARD, math.inf)])
def test_a_reward_that_would_break_a_mean_is_malformed(reward: float) -> None:
    assert "reward must be in" in str(parse_record(msgspec.msgpack.encode(trajectory(ABOUT, reward=reward)), ABOUT))


def test_the_largest_reward_is_admitted_and_can_be_averaged() -> None:
    record = parse_record(msgspec.msgpack.encode(trajectory(ABOUT, reward=MAX_REWARD)), ABOUT)
    assert isinstance(record, Trajectory)
    assert statistics.fmean([record.reward] * 100_000) == MAX_REWARD


@pytest.mark.parametrize("temperature", [math.nan, math.inf, 0.0, -1.0, 1e-300, 1e300, 0.7])
@pytest.mark.parametrize("top_p", [1.0, 0.999])
def test_a_record_is_drawn_as_its_lease_asked_whatever_it_says(temperature: float, top_p: float) -> None:
    """At a temperature of its own choice any log-probs are right: at 1e6, those of a fair die."""
    record = msgspec.msgpack.encode(msgspec.structs.replace(trajectory(ABOUT), temperature=temperature, top_p=top_p))
    assert "the lease asks for temperature 1 and top_p 1" in str(parse_record(record, ABOUT))
    asked = Asked(0.7, 0.999)
    assert isinstance(parse_record(record, ABOUT, asked), Trajectory) == ((temperature, top_p) == (0.7, 0.999))


@pytest.mark.parametrize("told", [math.nan, math.inf, -math.inf, -1e30, -9000.0, 0.1])
def test_a_log_prob_that_no_sampled_token_has_is_malformed(told: float) -> None:
    record = trajectory(ABOUT)
    asked, sampled = record.segments
    count = len(sampled.tokens)
    for value, admitted in ((told, False), (-8999.0, True)):
        given = msgspec.structs.replace(sampled, logprobs=pack_logprobs([-1.0] * (count - 1) + [value]))
        parsed = parse_record(msgspec.msgpack.encode(msgspec.structs.replace(record, segments=(asked, given))), ABOUT)
        assert isinstance(parsed, Trajectory) is admitted, parsed


def test_a_record_of_several_versions_says_which_sampled_each_token() -> None:
    spanning = trajectory(ABOUT, 3, newest=4)
    asked, sampled = spanning.segments
    assert isinstance(parse_record(msgspec.msgpack.encode(spanning), ABOUT), Trajectory)
    for versions, words in (
        (None, "tokens of several versions must say which"),
        (pack_tokens([3, 4, 5]), "tokens of versions 3 to 5 in a record of 0.3 to 0.4"),
        (pack_tokens([2, 3, 4]), "tokens of versions 2 to 4 in a record of 0.3 to 0.4"),
        (pack_tokens([3, 4]), "versions must match the 3 sampled tokens, got 2"),
    ):
        segments = (asked, msgspec.structs.replace(sampled, versions=versions))
        record = msgspec.msgpack.encode(msgspec.structs.replace(spanning, segments=segments))
        assert words in str(parse_record(record, ABOUT))


@pytest.mark.parametrize("policy", [Policy(-1, 0), Policy(0, -1), Policy(0, 2**53), Policy(2**64 - 1, 0)])
def test_a_policy_is_two_numbers_that_every_reader_holds_exactly(policy: Policy) -> None:
    record = msgspec.msgpack.encode(msgspec.structs.replace(trajectory(ABOUT, 0, newest=3), policy_min=policy))
    assert "not a trajectory" in str(parse_record(record, ABOUT))

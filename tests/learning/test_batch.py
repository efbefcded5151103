from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from trajectories import batch_of, trajectory

from echo2.learning.batch import BatchRules, TrainingRow, form_training_batch, minibatches
from echo2.types import FinishReason, Policy, Segment, Trajectory, pack_logprobs, pack_tokens

END = 2
"""End-of-turn id of these tests, and their padding id."""


def rows_of(*records: Trajectory, step: int = 0, **rules: Any) -> tuple[TrainingRow, ...]:
    return form_training_batch(batch_of({7: records}, step), BatchRules(**rules)).rows


def test_b07_a_sampled_end_token_carries_loss_even_where_it_is_the_padding_id() -> None:
    finished = trajectory([5, END, 6], [8, 9, END], 1.0, logprobs=[-0.1, -0.2, -0.3])
    row = rows_of(finished)[0]
    assert row.tokens[row.loss].tolist() == [8, 9, END]
    assert row.behaviour is not None
    assert row.behaviour[row.loss].tolist() == pytest.approx([-0.1, -0.2, -0.3])


def test_b07_a_reply_cut_at_the_limit_gets_no_end_token_and_keeps_all_its_tokens() -> None:
    cut = trajectory([5, 6], [8, 9, 10], 1.0, finish_reason=FinishReason.LENGTH)
    row = rows_of(cut)[0]
    assert row.tokens.tolist() == [5, 6, 8, 9, 10]
    assert row.targets == 3


def test_b07_replies_of_three_lengths_keep_their_own_ends_side_by_side() -> None:
    short, long = trajectory([5], [8, 9, END], 1.0), trajectory([5], [8, 9, 8, 9, 8, 9, END], 0.0)
    cut = trajectory([5], [8] * 9, 0.0, finish_reason=FinishReason.LENGTH)
    sampled = [row.tokens[row.loss].tolist() for row in rows_of(short, long, cut)]
    assert sampled == [[8, 9, END], [8, 9, 8, 9, 8, 9, END], [8] * 9]


def test_the_overlong_rule_takes_the_loss_but_not_the_reward_from_the_group() -> None:
    cut = trajectory([5], [8, 9], 0.0, finish_reason=FinishReason.LENGTH)
    whole = trajectory([5], [8, 9], 1.0)
    batch = form_training_batch(batch_of({0: [cut, whole]}), BatchRules(overlong="mask"))
    assert [row.targets for row in batch.rows] == [0, 2]
    assert batch.rows[1].advantage == pytest.approx(1.0, abs=1e-5)
    assert batch.overlong_rows == 1
    assert batch.trainable_tokens == 2


def test_b10_ids_of_several_turns_are_kept_as_sampled_and_only_sampled_ones_carry_loss() -> None:
    """I8"""
    segments = (
        Segment(pack_tokens([4, 5]), False),
        Segment(pack_tokens([10, 11]), True, pack_logprobs([-1.0, -2.0])),
        Segment(pack_tokens([6]), False),
        Segment(pack_tokens([12]), True, pack_logprobs([-3.0])),
    )
    row = rows_of(trajectory([], [], 1.0, logprobs=[], segments=segments))[0]
    assert row.tokens.tolist() == [4, 5, 10, 11, 6, 12]
    assert row.loss.tolist() == [False, False, True, True, False, True]
    assert row.behaviour is not None
    assert row.behaviour[row.loss].tolist() == [-1.0, -2.0, -3.0]


def test_a_first_token_that_nothing_precedes_carries_no_loss() -> None:
    assert rows_of(trajectory([], [8, 9]))[0].loss.tolist() == [False, True]


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": None},
        {"logprobs": [-1.0]},
        {"logprobs": [-1.0, math.nan]},
        {"logprobs": [-1.0, -math.inf]},
        {"logprobs": [-1.0, -1e30]},
        {"logprobs": [-1.0, 0.5]},
        {"logprobs": [-1.0, -1.0], "logprob_convention": "processed"},
    ],
)
def test_log_probs_the_learner_cannot_use_count_as_none(fields: dict[str, Any]) -> None:
    assert rows_of(trajectory([5], [8, 9], **fields))[0].behaviour is None


@pytest.mark.parametrize(
    "broken",
    [
        trajectory([5], [8], math.nan),
        trajectory([5], [8], math.inf),
        trajectory([5], [99], 1.0),
        trajectory([], [], 1.0),
        trajectory([5], [8], 1.0, temperature=0.0),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_left_out_and_does_not_touch_its_group(broken: Trajectory) -> None:
    others = [trajectory([5], [8], 1.0), trajectory([5], [9], 0.0)]
    batch = form_training_batch(batch_of({0: [others[0], broken, others[1]]}), BatchRules(vocabulary=32))
    assert batch.unusable_rows == 1
    assert [row.advantage for row in batch.rows] == pytest.approx([1.0, -1.0], abs=1e-4)


def test_b08_a_batch_without_sampled_tokens_reports_zero_trainable_tokens() -> None:
    batch = form_training_batch(batch_of({0: [trajectory([5, 6], []), trajectory([5, 6], [])]}), BatchRules())
    assert batch.trainable_tokens == 0


def test_the_same_prompt_leased_twice_stays_two_groups() -> None:
    records = [trajectory([5], [8], r) for r in (1.0, 0.0)]
    same = [trajectory([5], [8], r) for r in (1.0, 1.0)]
    batch = form_training_batch(batch_of({1: records, 2: same}), BatchRules())
    assert batch.advantages.keys == 2
    assert batch.advantages.zero_variance_keys == 1


def test_a_tasks_normalisation_key_joins_groups_of_that_task_only() -> None:
    fields = {"normalisation_key": "deal-3"}
    first = [trajectory([5], [8], r, **fields) for r in (1.0, 1.0)]
    second = [trajectory([5], [8], r, **fields) for r in (0.0, 0.0)]
    other = [trajectory([5], [8], 0.5, task="chess", **fields)] * 2
    batch = form_training_batch(batch_of({1: first, 2: second, 3: other}), BatchRules())
    assert batch.advantages.keys == 2
    assert [row.advantage for row in batch.rows] == pytest.approx([1, 1, -1, -1, 0, 0], abs=1e-4)


def test_only_rows_wholly_of_the_steps_own_version_are_current() -> None:
    fresh = trajectory([5], [8], version=4)
    stale = trajectory([5], [8], version=3)
    spanning = trajectory([5], [8], policy_min=Policy(0, 3), policy_max=Policy(0, 4))
    assert [row.current for row in rows_of(fresh, stale, spanning, step=4)] == [True, False, False]


def test_a_record_that_is_no_trajectory_is_an_error() -> None:
    reply = batch_of({0: [trajectory([5], [8])]})
    row = msgspec.structs.replace(reply.rows[0], record=msgspec.Raw(b"\xc0"))
    with pytest.raises(msgspec.MsgspecError):
        form_training_batch(msgspec.structs.replace(reply, rows=(row,)), BatchRules())


@pytest.mark.parametrize("updates", [1, 2, 3, 8])
def test_minibatches_are_disjoint_whole_groups_and_hold_everything(updates: int) -> None:
    groups = {g: [trajectory([g], [g, i]) for i in range(2 + g % 2)] for g in range(5)}
    rows = form_training_batch(batch_of(groups), BatchRules()).rows
    parts = minibatches(rows, updates)
    assert len(parts) == updates
    assert sorted(id(row) for part in parts for row in part) == sorted(id(row) for row in rows)
    homes = [{row.group for row in part} for part in parts]
    assert sum(len(home) for home in homes) == len(set[int]().union(*homes)) == 5
    assert max(len(home) for home in homes) - min(len(home) for home in homes) <= 1


def test_arrays_of_a_row_have_one_length() -> None:
    row = rows_of(trajectory(np.arange(5), [1, 2, 3], logprobs=[-1, -1, -1]))[0]
    assert row.behaviour is not None
    assert len(row.tokens) == len(row.loss) == len(row.behaviour) == 8


def test_c01_groups_without_signal_are_left_out_on_request_and_counted() -> None:
    same = [trajectory([5], [8, 9], 1.0), trajectory([5], [9, 8, 7], 1.0)]
    other = [trajectory([5], [8], 1.0), trajectory([5], [9], 0.0)]
    kept, dropped = (
        form_training_batch(batch_of({3: same, 9: other}), BatchRules(zero_variance=rule)) for rule in ("keep", "drop")
    )
    assert [row.targets for row in kept.rows] == [2, 3, 1, 1]
    assert [row.targets for row in dropped.rows] == [0, 0, 1, 1]
    assert (kept.dropped_rows, dropped.dropped_rows) == (0, 2)
    assert kept.advantages.zero_variance_keys == dropped.advantages.zero_variance_keys == 1


def test_tokens_above_an_age_are_left_out_by_the_version_that_sampled_each() -> None:
    """Step 5, at most 2 steps old: version 3 stays and 2 goes. The rewards of old rows count in the mean."""
    fresh = trajectory([4], [8, 9], 1.0, version=3)
    old = trajectory([4], [8, 9, 7], 0.0, version=2)
    segments = (Segment(pack_tokens([4]), False), Segment(pack_tokens([10, 11]), True, None, pack_tokens([2, 3])))
    spanning = trajectory([], [], 0.5, segments=segments, policy_min=Policy(0, 2), policy_max=Policy(0, 3))
    batch = form_training_batch(batch_of({0: [fresh, old, spanning]}, 5), BatchRules(max_age_steps=2))
    assert [row.loss.tolist() for row in batch.rows] == [[False, True, True], [False] * 4, [False, False, True]]
    assert batch.aged_tokens == 4
    assert batch.rows[0].advantage > 0 > batch.rows[1].advantage
    assert form_training_batch(batch_of({0: [fresh, old, spanning]}, 5), BatchRules()).trainable_tokens == 7


def test_groups_are_numbered_within_the_batch() -> None:
    batch = form_training_batch(batch_of({70: [trajectory([5], [8])] * 2, 7: [trajectory([5], [9])]}), BatchRules())
    assert [row.group for row in batch.rows] == [0, 0, 1]
    assert batch.groups == 2

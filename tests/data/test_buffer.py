"""The staleness-bounded buffer: I1, I2, I3, and the field reports C11, D01, D08."""

from __future__ import annotations

import math

import msgspec
import pytest
from building import failed_row, prompt, row, rows, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.buffer import Buffer, BufferRules
from echo2.data.groups import BatchPut, Group, GroupState, RowPut, RowsMoved
from echo2.types import Policy, RowState, RowStatus, Verdict

N = 2


def any_published(policy: Policy) -> Verdict | None:
    return None


def make(staleness_budget: int = 2, groups_per_batch: int = 1, **rules: object) -> Buffer:
    defaults: dict[str, object] = {"max_attempts": 2}
    return Buffer(BufferRules(staleness_budget, groups_per_batch, **{**defaults, **rules}), any_published)  # type: ignore[arg-type]


def lease(buffer: Buffer, version: int = 0, number: int = 0, worker: str = "w1", size: int = N) -> Group:
    group = buffer.open_group(prompt(number), size)
    buffer.grant(group, f"lease-{group.group_id}-1", worker, Policy(0, version))
    return group


def fill(buffer: Buffer, version: int = 0, rewards: tuple[float, ...] = (1.0, 0.0)) -> Group:
    group = lease(buffer, version, size=len(rewards))
    assert set(buffer.submit(group.group_id, 1, rows(group.prompt, version, rewards))) == {Verdict.ACCEPTED}
    return group


def check_books(buffer: Buffer) -> None:
    """I3, and the incremental counts equal a recount."""
    assert buffer.generated == sum(buffer.counts.values())
    recount = [r.state for group in buffer.rows.values() for r in group.values()]
    for state in RowState:
        assert buffer.counts[state] == recount.count(state)
    live: dict[int, int] = {}
    for number, group in buffer.groups.items():
        counted = group.leased and number not in buffer._overdue
        if group.state is GroupState.CLOSED or (group.state is GroupState.OPEN and counted):
            assert group.policy is not None
            live[group.policy.version] = live.get(group.policy.version, 0) + 1
    assert dict(buffer.live) == live


class TestAdmission:
    def test_a_row_is_stamped_with_the_version_that_began_it_and_ages_until_it_is_taken(self) -> None:
        """D01: S = 2, sampled under v3; a batch at 5 may take it, a batch at 6 may not."""
        for step, formed in ((5, True), (6, False)):
            buffer = make(staleness_budget=2)
            fill(buffer, version=3)
            buffer.next_batch = step
            assert (buffer.form_batch() is not None) == formed
            assert buffer.counts[RowState.EXPIRED] == (0 if formed else N)

    def test_a_stale_arrival_is_refused_and_its_group_is_not_tried_again(self) -> None:
        buffer = make(staleness_budget=1)
        group = lease(buffer, version=0)
        buffer.next_batch = 2
        assert buffer.submit(group.group_id, 1, rows(group.prompt, 0)) == [Verdict.STALE] * N
        assert (group.state, buffer.counts[RowState.REFUSED]) == (GroupState.DROPPED, N)

    def test_admission_goes_by_the_oldest_policy_of_a_mixed_record(self) -> None:
        """I5"""
        buffer = make(staleness_budget=1)
        group = lease(buffer, version=2)
        buffer.next_batch = 3
        record = trajectory(group.prompt, 1, newest=3)
        assert buffer.submit(group.group_id, 1, [row(0, record)]) == [Verdict.STALE]

    def test_unpublished_and_orphaned_policies_are_refused(self) -> None:
        """I2"""
        verdicts = {Policy(0, 1): Verdict.FUTURE, Policy(0, 0): None, Policy(0, 9): Verdict.ORPHANED}
        buffer = Buffer(BufferRules(9, 1, 3), verdicts.__getitem__)
        for policy, expected in ((Policy(0, 1), Verdict.FUTURE), (Policy(0, 9), Verdict.ORPHANED)):
            group = lease(buffer)
            assert buffer.submit(group.group_id, 1, [row(0, trajectory(group.prompt, policy))]) == [expected]

    @pytest.mark.parametrize(
        "spoil",
        [
            lambda t: b"\xc1",
            lambda t: b"",
            lambda t: msgspec.msgpack.encode({"task": "toy"}),
            lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, reward=math.nan)),
            lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, reward=math.inf)),
            lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, prompt_id="another")),
            lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, segments=t.segments[:1])),
            lambda t: msgspec.msgpack.encode(msgspec.structs.replace(t, policy_min=Policy(0, 5))),
            lambda t: msgspec.msgpack.encode(
                msgspec.structs.replace(t, segments=(msgspec.structs.replace(t.segments[1], logprobs=b"\0\0\0\0"),))
            ),
            lambda t: msgspec.msgpack.encode(
                msgspec.structs.replace(t, segments=(msgspec.structs.replace(t.segments[1], token_ids=b"\0\0\0"),))
            ),
        ],
    )
    def test_a_malformed_record_gets_a_verdict_and_its_index_is_tried_again(self, spoil: object) -> None:
        buffer = make(staleness_budget=9)
        group = lease(buffer)
        good = trajectory(group.prompt)
        verdicts = buffer.submit(group.group_id, 1, [row(0, good), row(1, spoil(good))])  # type: ignore[operator]
        assert verdicts == [Verdict.ACCEPTED, Verdict.MALFORMED]
        assert buffer.missing(group) == (1,)
        assert buffer.awaiting_lease() == [group]
        check_books(buffer)


class TestExactlyOnce:
    def test_a_retried_submission_gets_its_old_verdicts_and_changes_nothing(self) -> None:
        buffer = make(groups_per_batch=9)
        group = fill(buffer)
        buffer.drain_changes()
        assert buffer.submit(group.group_id, 1, rows(group.prompt, 0)) == [Verdict.ACCEPTED] * N
        assert buffer.drain_changes() == []

    def test_the_first_accepted_row_of_an_index_wins_over_a_late_one(self) -> None:
        """D08: leased to W1, lost, leased to W2, W2 submits, W1 submits late, W2 retries."""
        buffer = make(groups_per_batch=9)
        group = lease(buffer)
        buffer.lose_lease(group.group_id, 1)
        buffer.grant(group, "lease-2", "w2", Policy(0, 0))
        assert buffer.submit(group.group_id, 2, rows(group.prompt, 0, (1.0, 1.0))) == [Verdict.ACCEPTED] * N
        assert buffer.submit(group.group_id, 1, rows(group.prompt, 0, (0.0, 0.0))) == [Verdict.DUPLICATE] * N
        assert buffer.submit(group.group_id, 2, rows(group.prompt, 0, (1.0, 1.0))) == [Verdict.ACCEPTED] * N
        batch_rows = buffer.accepted(group)
        assert [(r.index, r.reward) for r in batch_rows] == [(0, 1.0), (1, 1.0)]
        check_books(buffer)

    def test_a_late_result_is_taken_when_nobody_delivered_before_it(self) -> None:
        buffer = make(groups_per_batch=9)
        group = lease(buffer)
        buffer.lose_lease(group.group_id, 1)
        buffer.grant(group, "lease-2", "w2", Policy(0, 0))
        assert buffer.submit(group.group_id, 1, rows(group.prompt, 0)) == [Verdict.ACCEPTED] * N
        assert (group.state, group.leased) == (GroupState.CLOSED, False)

    def test_an_index_that_was_not_leased_is_unattributed_and_makes_no_row(self) -> None:
        buffer = make(groups_per_batch=9)
        group = lease(buffer)
        assert buffer.submit(group.group_id, 1, [row(7, trajectory(group.prompt))]) == [Verdict.UNATTRIBUTED]
        assert buffer.generated == 0

    def test_repeating_a_step_report_changes_nothing(self) -> None:
        buffer = make()
        fill(buffer)
        batch = buffer.form_batch()
        assert batch is not None
        buffer.report_step(0)
        before = dict(buffer.counts)
        buffer.report_step(0)
        assert dict(buffer.counts) == before == {**before, RowState.TRAINED: N, RowState.BUFFERED: 0}

    def test_a_batch_is_the_same_whenever_it_is_asked_for(self) -> None:
        one, two = make(groups_per_batch=2), make(groups_per_batch=2)
        for buffer in (one, two):
            fill(buffer)
            fill(buffer, rewards=(0.5, 0.5))
        first, second = one.form_batch(), two.form_batch()
        assert first == second
        assert first is not None
        assert [key[:2] for key in first.rows] == [(0, 0), (0, 1), (1, 0), (1, 1)]


class TestGroups:
    def test_a_failed_attempt_is_leased_again_for_what_is_missing(self) -> None:
        buffer = make(groups_per_batch=9)
        group = lease(buffer)
        assert buffer.submit(group.group_id, 1, [row(0, trajectory(group.prompt)), failed_row(1)]) == [
            Verdict.ACCEPTED,
            Verdict.FAILED,
        ]
        again = buffer.grant(group, "lease-2", "w2", Policy(0, 1))
        assert again.indices == (1,)
        assert group.policy == Policy(0, 0), "a group of mixed versions counts as its oldest"

    def test_a_failure_is_a_status_and_never_a_zero_reward(self) -> None:
        """I4"""
        buffer = make(max_attempts=1, groups_per_batch=9)
        group = lease(buffer, size=3)
        good = [row(0, trajectory(group.prompt)), row(1, trajectory(group.prompt, reward=0.0))]
        buffer.submit(group.group_id, 1, [*good, failed_row(2, RowStatus.TIMEOUT)])
        assert group.state is GroupState.CLOSED
        assert sorted(r.reward for r in buffer.accepted(group) if r.reward is not None) == [0.0, 1.0]
        assert buffer.counts[RowState.FAILED] == 1

    def test_a_group_left_with_one_survivor_is_dropped_and_counted(self) -> None:
        buffer = make(max_attempts=1)
        group = lease(buffer)
        buffer.submit(group.group_id, 1, [row(0, trajectory(group.prompt)), failed_row(1)])
        assert (group.state, buffer.groups_dropped) == (GroupState.DROPPED, 1)
        assert buffer.counts == {RowState.EXPIRED: 1, RowState.FAILED: 1, RowState.BUFFERED: 0}

    def test_the_length_of_what_expires_is_counted(self) -> None:
        """D10: whether it is the long replies that are thrown away."""
        buffer = make(staleness_budget=2)
        fill(buffer, version=0)
        lengths = [r.tokens for rows in buffer.rows.values() for r in rows.values()]
        buffer.next_batch = 3
        buffer.expire()
        assert buffer.counts[RowState.EXPIRED] == len(lengths)
        assert buffer.expired_tokens == sum(lengths) > 0

    def test_what_a_worker_delivered_that_was_set_aside_is_refused_and_leased_again(self) -> None:
        buffer = make(max_attempts=2)
        taken, lone, shared = fill(buffer), fill(buffer), lease(buffer)
        assert buffer.form_batch() is not None
        buffer.submit(shared.group_id, 1, [row(0, trajectory(shared.prompt)), failed_row(1)])
        buffer.grant(shared, "another", "w2", Policy(0, 0))
        buffer.submit(shared.group_id, 2, [row(1, trajectory(shared.prompt))])
        assert shared.state is GroupState.CLOSED
        assert buffer.distrust("w1") == 3
        assert buffer.refused_by[Verdict.DISTRUSTED] == buffer.counts[RowState.REFUSED] == 3
        assert taken.state is GroupState.TAKEN
        assert [group.group_id for group in buffer.awaiting_lease()] == [lone.group_id]
        assert shared.state is GroupState.DROPPED, "it has no attempt left"
        check_books(buffer)
        buffer.grant(lone, "again", "w2", Policy(0, 0))
        assert set(buffer.submit(lone.group_id, 2, rows(lone.prompt))) == {Verdict.ACCEPTED}
        assert lone.state is GroupState.CLOSED
        assert buffer.distrust("w1") == 0
        check_books(buffer)

    def test_groups_keep_their_rows_whatever_the_order_of_arrival(self) -> None:
        """C11: A, B, A, B, B, A with one reply of A lost."""
        buffer = make(groups_per_batch=2, max_attempts=1)
        a, b = lease(buffer, number=1, size=4), lease(buffer, number=1, size=4)
        buffer.submit(b.group_id, 1, rows(b.prompt, 0, (1.0, 1.0, 0.0, 0.0)))
        buffer.submit(a.group_id, 1, [*rows(a.prompt, 0, (1.0, 0.0, 0.0)), failed_row(3)])
        batch = buffer.form_batch()
        assert batch is not None
        by_group = {
            g: [r.reward for r in buffer.batch_rows(batch) if r.group_id == g] for g in (a.group_id, b.group_id)
        }
        assert by_group == {a.group_id: [1.0, 0.0, 0.0], b.group_id: [1.0, 1.0, 0.0, 0.0]}

    def test_groups_without_signal_are_dropped_on_request_but_at_most_so_many_per_batch(self) -> None:
        buffer = make(drop_zero_variance=True, max_zero_variance_drops=1, groups_per_batch=9)
        group = lease(buffer)
        assert buffer.submit(group.group_id, 1, rows(group.prompt, 0, (1.0, 1.0))) == [Verdict.NO_SIGNAL] * N
        assert (buffer.counts[RowState.REFUSED], buffer.refused_by[Verdict.NO_SIGNAL]) == (N, N)
        kept = lease(buffer)
        assert buffer.submit(kept.group_id, 1, rows(kept.prompt, 0, (1.0, 1.0))) == [Verdict.ACCEPTED] * N
        check_books(buffer)

    def test_equal_rewards_that_are_measured_against_other_groups_are_signal(self) -> None:
        buffer = make(drop_zero_variance=True, max_zero_variance_drops=9, groups_per_batch=9)
        group = lease(buffer)
        record = msgspec.structs.replace(trajectory(group.prompt, 0), normalisation_key="batch")
        assert buffer.submit(group.group_id, 1, [row(index, record) for index in range(N)]) == [Verdict.ACCEPTED] * N


class TestBatches:
    def test_the_oldest_admissible_groups_come_first_by_default(self) -> None:
        buffer = make(staleness_budget=5)
        fill(buffer, version=2)
        old = fill(buffer, version=1)
        batch = buffer.form_batch()
        assert batch is not None
        assert {key[0] for key in batch.rows} == {old.group_id}

    def test_the_freshest_come_first_on_request(self) -> None:
        buffer = make(staleness_budget=5, order="freshest")
        fill(buffer, version=1)
        new = fill(buffer, version=2)
        batch = buffer.form_batch()
        assert batch is not None
        assert {key[0] for key in batch.rows} == {new.group_id}

    def test_lag_one_data_is_used_at_once(self) -> None:
        """D10: nothing demands exactly the current version."""
        buffer = make(staleness_budget=2)
        fill(buffer, version=0)
        buffer.next_batch = 1
        assert buffer.form_batch() is not None

    def test_records_go_after_a_newer_checkpoint_and_the_last_digest_stays(self) -> None:
        buffer = make()
        for step in range(3):
            fill(buffer, version=0)
            assert buffer.form_batch() is not None
            buffer.report_step(step)
        buffer.release_records(2)
        assert sorted(buffer.batches) == [1, 2]
        assert buffer.records_from == 2


class TestFork:
    def history(self) -> tuple[Buffer, dict[Policy, Verdict | None]]:
        known: dict[Policy, Verdict | None] = {Policy(0, 0): None, Policy(0, 2): None}
        return Buffer(BufferRules(9, 1, 1), lambda policy: known.get(policy, Verdict.FUTURE)), known

    def test_a_batch_of_surviving_policies_is_replayed_as_it_was(self) -> None:
        buffer, known = self.history()
        fill(buffer, version=0)
        before = buffer.form_batch()
        known[Policy(0, 2)] = Verdict.ORPHANED
        buffer.fork(0)
        assert buffer.batches[0] == before
        assert buffer.next_batch == 1

    def test_a_batch_with_an_orphaned_policy_dissolves_and_its_trained_rows_stay_trained(self) -> None:
        buffer, known = self.history()
        fill(buffer, version=0)
        assert buffer.form_batch() is not None
        fill(buffer, version=2)
        assert buffer.form_batch() is not None
        buffer.report_step(0)
        buffer.report_step(1)
        waiting = fill(buffer, version=2)
        known[Policy(0, 2)] = Verdict.ORPHANED
        buffer.fork(1)
        assert buffer.next_batch == 1
        assert 1 not in buffer.batches
        assert buffer.counts[RowState.TRAINED] == 2 * N
        assert waiting.state is GroupState.DROPPED
        check_books(buffer)


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["lease", "good", "bad", "fail", "lose", "late", "again", "batch", "report", "overdue", "distrust"]
                ),
                st.integers(0, 5),
            ),
            max_size=60,
        )
    )


@settings(max_examples=150, deadline=None)
@given(
    history=histories(),
    budget=st.integers(0, 3),
    period=st.integers(1, 3),
    order=st.sampled_from(["oldest", "freshest"]),
)
def test_no_history_breaks_the_books_or_the_staleness_bound(
    history: list[tuple[str, int]], budget: int, period: int, order: str
) -> None:
    """I1, I3 under arbitrary interleavings of leases, results, losses, retries, batches and reports."""
    buffer = make(staleness_budget=budget, groups_per_batch=2, order=order)
    reported, trained = 0, set()
    changes = []
    for action, pick in history:
        published = reported - reported % period
        groups = list(buffer.groups.values())
        group = groups[pick % len(groups)] if groups else None
        if action == "lease":
            waiting = buffer.awaiting_lease()
            target = waiting[0] if waiting else buffer.open_group(prompt(pick), N)
            buffer.grant(target, f"l{target.group_id}-{target.attempt}", f"w{pick % 2}", Policy(0, published))
        elif action == "distrust":
            buffer.distrust(f"w{pick % 2}")
        elif action == "batch" and buffer.next_batch == reported:
            batch = buffer.form_batch()
            for taken in buffer.batch_rows(batch) if batch else []:
                assert taken.policy.version >= buffer.next_batch - 1 - budget, "I1"
                assert taken.key not in trained, "trained twice"
                trained.add(taken.key)
        elif action == "report" and buffer.next_batch > reported:
            buffer.report_step(reported)
            reported += 1
            buffer.release_records(reported - reported % period)
        elif group is not None and group.attempt:
            attempt = group.attempt if action != "late" else max(1, group.attempt - 1)
            policy = group.attempts[attempt - 1].policy
            match action:
                case "good" | "late" | "again":
                    buffer.submit(group.group_id, attempt, rows(group.prompt, policy, (1.0, float(pick % 2))))
                case "bad":
                    buffer.submit(group.group_id, attempt, [row(0, b"\xc0"), row(1, trajectory(group.prompt, policy))])
                case "fail":
                    buffer.submit(group.group_id, attempt, [failed_row(0), failed_row(1)])
                case "lose":
                    buffer.lose_lease(group.group_id, attempt)
                case "overdue":
                    buffer.mark_overdue(group.group_id)
        changes += buffer.drain_changes()
        check_books(buffer)
    born = [change.row.key for change in changes if isinstance(change, RowPut)]
    assert len(born) == len(set(born)) == buffer.generated
    moved = [key for change in changes if isinstance(change, RowsMoved) for key in change.keys]
    assert set(moved) <= set(born)
    assert [c.batch.step for c in changes if isinstance(c, BatchPut)] == list(range(buffer.next_batch))

"""Bets against a worker's honesty: noise within the tolerance never wins them, other log-probs soon do."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.data.auditing import BLOCK_TOKENS, ERROR, FULL_TOKENS, MOST_TOLD, Audits, Stake
from echo2.transport.messages import AUDIT_EDGES_NATS, MOST_AUDITED, ReportStep, RowAudit

TOLERANCE = 0.1


def audit(mean_nats: float, tokens: int = FULL_TOKENS, excess: float | None = 0.0, group: int = 0) -> RowAudit:
    """Every token differs by ``mean_nats``; ``excess`` per token."""
    bins = [0] * (len(AUDIT_EDGES_NATS) + 1)
    bins[int(np.searchsorted(AUDIT_EDGES_NATS, mean_nats, side="right"))] = tokens
    total = None if excess is None else excess * tokens
    return RowAudit(group, 0, tuple(bins), mean_nats * tokens, mean_nats, total)


def groups_until_caught(audits: Audits, most: int, *seen: RowAudit) -> int | None:
    for count in range(1, most + 1):
        audits.add("w", seen)
        if audits.take_convicted():
            return count
    return None


@given(
    st.lists(st.tuples(st.floats(0.0, TOLERANCE), st.integers(1, 500), st.floats(-TOLERANCE, TOLERANCE)), max_size=200)
)
def test_a_worker_that_stays_within_the_tolerance_is_never_caught(seen: list[tuple[float, int, float]]) -> None:
    audits = Audits(TOLERANCE)
    for mean, tokens, excess in seen:
        audits.add("w", [audit(mean, tokens, excess)])
    assert not audits.take_convicted()


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.02, 0.1, 0.5]))
def test_noise_whose_mean_is_half_the_tolerance_never_trips_however_it_is_spread(seed: int, spread: float) -> None:
    """``spread`` 0.5: most groups agree exactly, and one in twenty is off by a nat."""
    random = np.random.default_rng(seed)
    audits = Audits(TOLERANCE)
    mean = TOLERANCE / 2
    for value in random.gamma(1 / spread, mean * spread, 300) if spread < 0.5 else random.binomial(1, mean, 300):
        audits.add("w", [audit(float(value), excess=float(random.normal(0.0, 0.3)))])
    assert not audits.take_convicted()


@given(st.lists(st.floats(0.0, 0.06), max_size=50), st.floats(0.5, 50.0))
def test_a_worker_that_is_off_by_half_a_nat_is_caught_within_ten_groups_whatever_it_did_before(
    before: list[float], off: float
) -> None:
    audits = Audits(TOLERANCE)
    for mean in before:
        audits.add("w", [audit(mean)])
    caught = groups_until_caught(audits, 10, audit(off))
    assert caught is not None and caught >= 7


@given(st.integers(1, 6))
def test_a_handful_of_groups_convicts_nobody(groups: int) -> None:
    audits = Audits(TOLERANCE)
    assert groups_until_caught(audits, groups, audit(100.0, 10_000)) is None


def test_short_replies_are_weaker_evidence() -> None:
    counts = [groups_until_caught(Audits(TOLERANCE), 1000, audit(1.0, tokens)) or 0 for tokens in (1, 4, 32, 1000)]
    assert counts[0] > counts[1] > counts[2] == counts[3]
    assert counts[0] > 20


def test_the_chance_of_a_false_alarm_is_as_stated_where_noise_is_as_large_as_the_tolerance() -> None:
    """A stake's mean cannot grow: so over all n observations it wins with at most n·ERROR. Shown at a coarse stake."""
    random = np.random.default_rng(0)
    won = 0
    for _ in range(2000):
        stake = Stake(TOLERANCE)
        for x in random.binomial(1, TOLERANCE, 20):
            stake.bet(float(x))
            if stake.log >= math.log(500):
                won += 1
                break
    assert won / 2000 <= 20 / 500
    assert ERROR == 1e-6


@pytest.mark.parametrize(("excess", "told"), [(0.5, "likelier"), (-2.0, "less likely")])
def test_tokens_that_were_not_drawn_as_stated_are_found_although_their_log_probs_are_right(
    excess: float, told: str
) -> None:
    audits = Audits(TOLERANCE)
    for _ in range(40):
        audits.add("w", [audit(0.001, BLOCK_TOKENS, excess)])
    assert f"nats a token {told} than they draw" in audits.take_convicted()["w"]


@pytest.mark.parametrize("correct", [0.9, 0.98, 0.02])
def test_groups_that_were_kept_for_their_signal_convict_no_honest_worker(correct: float) -> None:
    """Replies of an answer and an end. Of four, some are right and some wrong, or the group is dropped: what is rare
    is seen too often, so tokens seem less likely than their policy draws them."""
    random = np.random.default_rng(0)
    entropy = -correct * math.log(correct) - (1 - correct) * math.log(1 - correct)
    chosen, told = Audits(TOLERANCE, groups_chosen=True), Audits(TOLERANCE)
    right = random.random((90_000, 4)) < correct
    kept = right[right.any(1) & ~right.all(1)][:6000]
    for group, drawn in enumerate(kept[:, 0]):
        row = audit(0.001, 2, (math.log(correct if drawn else 1 - correct) + entropy) / 2, group)
        chosen.add("w", [row])
        told.add("w", [row])
    assert not chosen.take_convicted()
    assert "less likely" in told.take_convicted().get("w", "") or correct == 0.9


def test_a_temperature_shows_in_groups_that_were_kept_for_their_signal_too() -> None:
    assert groups_until_caught(Audits(TOLERANCE, groups_chosen=True), 40, audit(0.001, BLOCK_TOKENS, 0.5)) is not None


def test_tokens_of_a_nucleus_say_nothing_of_how_they_were_drawn() -> None:
    audits = Audits(TOLERANCE)
    assert groups_until_caught(audits, 200, audit(0.001, BLOCK_TOKENS, None)) is None
    assert audits.told({})["w"].excess_nats is None


def test_at_tolerance_0_everything_is_measured_and_nobody_caught() -> None:
    audits = Audits(0.0)
    assert groups_until_caught(audits, 50, audit(5.0, 300, -3.0)) is None
    assert audits.told({"w": "name"})["w"].mean_nats == pytest.approx(5.0)


def test_a_worker_is_told_in_numbers() -> None:
    audits = Audits(TOLERANCE)
    audits.add("w", [audit(0.004, 98), audit(0.7, 2)])
    audits.add("idle", [audit(0.0, 0)])
    told = audits.told({"w": "ada"})
    assert set(told) == {"w"}
    found = told["w"]
    assert (found.name, found.groups, found.tokens) == ("ada", 1, 100)
    assert found.mean_nats == pytest.approx((0.004 * 98 + 1.4) / 100)
    assert (found.p99_nats, found.beyond_share) == (0.7, 0.02)


def test_a_line_tells_of_a_bounded_number_of_workers_the_worst_among_them() -> None:
    audits = Audits(TOLERANCE)
    for worker in range(MOST_TOLD + 10):
        audits.add(f"w{worker:03}", [audit(worker / 10_000)])
    told = audits.told({})
    assert len(told) == MOST_TOLD and "w073" in told and "w000" not in told


@pytest.mark.parametrize(
    "change",
    [
        {"bins": (1, 2)},
        {"total": math.nan},
        {"total": -1.0},
        {"largest": math.inf},
        {"excess": math.nan},
        {"group_id": -1},
    ],
)
def test_a_report_with_impossible_numbers_is_not_decoded(change: dict[str, object]) -> None:
    report = ReportStep(1, 0, 1.0, 0.0, {}, (audit(0.1),))
    good = msgspec.msgpack.encode(report)
    assert msgspec.msgpack.decode(good, type=ReportStep) == report
    bad = msgspec.structs.replace(report, audits=(msgspec.structs.replace(audit(0.1), **change),))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(bad), type=ReportStep)


def test_a_report_tells_of_a_bounded_number_of_rows() -> None:
    report = ReportStep(1, 0, 1.0, 0.0, {}, (audit(0.1),) * (MOST_AUDITED + 1))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=ReportStep)

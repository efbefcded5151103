"""What the learner asks of the pool: the capacity rule applied to one run's times at one (S, kappa).

Invariant: pure; a pair (S, kappa) that mode ``echo2`` refuses, or that no pool could keep saturated, is ``Infeasible``
with the numbers in the relation, and a rate that comes back is positive and finite.

Two rules ask for different rates. ``paper`` is equation (2): dissemination is time in which nobody generates.
``overlapped`` is (2′): workers go on under the old snapshot, as this project's do, so less is needed. Both rates are
worth knowing; one of them, times gamma, is the target.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

from echo2.errors import UserError
from echo2.provisioning import capacity
from echo2.provisioning.capacity import RELATIVE_TOLERANCE, Infeasible

Rule = Literal["paper", "overlapped"]
SMALLEST_STALENESS_BUDGET = 3
"""2 ≤ kappa ≤ S − 1 has no solution below it."""
SMALLEST_PUBLISH_PERIOD = 2
LARGEST_STALENESS_BUDGET = 1000
"""Far above any use (plain GRPO diverges at 11), and few enough kappa to try them all."""


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """What a step takes and consumes.

    Example: ``Times(t_train_s=1631.2, t_bcast_s=1310.0, rollouts_per_step=2048)``.
    """

    t_train_s: float
    t_bcast_s: float
    rollouts_per_step: int
    """R: trajectories, not prompts."""
    t_gen_s: float = 0.0
    """Time to finish a group; 0 where it is not known."""

    def with_t_bcast(self, t_bcast_s: float) -> Times:
        return msgspec.structs.replace(self, t_bcast_s=t_bcast_s)


class Cadence(NamedTuple):
    """How stale a trajectory may be and how often weights are published, both in training steps."""

    staleness_budget: int
    publish_period: int


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """A run that wants its learner saturated.

    Raises UserError for a gamma below 1 or not finite.
    """

    times: Times
    rule: Rule = "overlapped"
    gamma: float = 1.1
    """The target is gamma times the required rate."""

    def __post_init__(self) -> None:
        if not 1 <= self.gamma <= 1000:
            raise UserError(f"gamma must be a number from 1 to 1000, got {self.gamma:g}; use 1.1")

    def required_per_s(self, cadence: Cadence) -> float:
        """By the rule, without gamma. Raises Infeasible."""
        check_cadence(cadence)
        return paper_rate(self.times, cadence) if self.rule == "paper" else overlapped_rate(self.times, cadence)

    def target_per_s(self, cadence: Cadence) -> float:
        """What to provision. Raises Infeasible."""
        return self.gamma * self.required_per_s(cadence)


def check_cadence(cadence: Cadence) -> None:
    """Raises Infeasible unless 2 ≤ kappa ≤ S − 1."""
    budget, period = cadence
    if not SMALLEST_PUBLISH_PERIOD <= period <= budget - 1:
        raise Infeasible(
            f"2 <= kappa <= S - 1 must hold, got kappa = {period} with S = {budget}",
            f"set S to {max(budget, period + 1, SMALLEST_STALENESS_BUDGET)} and kappa to "
            f"{max(period, SMALLEST_PUBLISH_PERIOD)}",
        )


def paper_rate(times: Times, cadence: Cadence) -> float:
    """Equation (2). Raises Infeasible."""
    return capacity.mu_min(
        t_train_s=times.t_train_s,
        t_bcast_s=times.t_bcast_s,
        publish_period=cadence.publish_period,
        rollouts_per_step=times.rollouts_per_step,
    )


def overlapped_rate(times: Times, cadence: Cadence) -> float:
    """Equation (2′), where a publish has arrived before the next one begins. Raises Infeasible."""
    check_arrives(times, cadence)
    return capacity.mu_min_overlapped(
        t_train_s=times.t_train_s,
        t_bcast_s=times.t_bcast_s,
        t_gen_s=times.t_gen_s,
        staleness_budget=cadence.staleness_budget,
        publish_period=cadence.publish_period,
        rollouts_per_step=times.rollouts_per_step,
    )


def check_arrives(times: Times, cadence: Cadence) -> None:
    """Raises Infeasible unless T_bcast ≤ kappa·T_train: else publishes queue up and come later and later."""
    period_s = cadence.publish_period * times.t_train_s
    if times.t_bcast_s > period_s * (1 + RELATIVE_TOLERANCE):
        raise Infeasible(
            f"T_bcast must be at most kappa * T_train, got {times.t_bcast_s:g} s against {cadence.publish_period} * "
            f"{times.t_train_s:g} s = {period_s:g} s",
            "publish less often",
        )


def step_period_s(times: Times, cadence: Cadence, mu_pool_per_s: float) -> float:
    """Mean time from step to step with such a pool, by (2′): T_train where the learner never waits."""
    return capacity.step_period_s(
        t_train_s=times.t_train_s,
        t_bcast_s=times.t_bcast_s,
        t_gen_s=times.t_gen_s,
        staleness_budget=cadence.staleness_budget,
        publish_period=cadence.publish_period,
        rollouts_per_step=times.rollouts_per_step,
        mu_pool_per_s=mu_pool_per_s,
    )


def bubble_ratio(times: Times, cadence: Cadence, mu_pool_per_s: float) -> float:
    """The learner's predicted share of idle time with such a pool, by (2′)."""
    period_s = step_period_s(times, cadence, mu_pool_per_s)
    return capacity.predicted_bubble_ratio(t_train_s=times.t_train_s, period_s=period_s)


def staleness_bounds(times: Times, cadence: Cadence, mu_pool_per_s: float) -> tuple[int, int]:
    """(7) and (12), in training steps."""
    conservative = capacity.staleness_bound(
        t_train_s=times.t_train_s,
        t_bcast_s=times.t_bcast_s,
        publish_period=cadence.publish_period,
        rollouts_per_step=times.rollouts_per_step,
        mu_pool_per_s=mu_pool_per_s,
    )
    tight = capacity.staleness_bound_tight(
        t_train_s=times.t_train_s, t_bcast_s=times.t_bcast_s, publish_period=cadence.publish_period
    )
    return conservative, tight


def overlap_holds(times: Times, cadence: Cadence, mu_pool_per_s: float) -> bool:
    """(1), which (12) presumes."""
    return capacity.overlap_holds(
        t_train_s=times.t_train_s,
        t_bcast_s=times.t_bcast_s,
        publish_period=cadence.publish_period,
        rollouts_per_step=times.rollouts_per_step,
        mu_pool_per_s=mu_pool_per_s,
    )

"""How much rollout capacity a run needs, and how stale its data can get: the paper's model, one function per equation.

Invariant: every function is pure, and an impossible plan is an ``Infeasible`` error whose sentence holds the numbers;
no function ever returns a negative, infinite or undefined rate.

Symbols, as in the paper: T_train (``t_train_s``) is the time of a training step, T_bcast (``t_bcast_s``) the time from
the start of a publish until the share 1/gamma of active workers installed it, kappa (``publish_period``) the training
steps between two publishes, R (``rollouts_per_step``) the trajectories a step consumes, mu the delivered trajectories
per second. Times are seconds, rates trajectories per second.

(7) and (12) leave generation and queueing time out: they are plans. The guarantee is the buffer's (invariant I1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache

from echo2.errors import UserError

RELATIVE_TOLERANCE = 1e-9
"""A boundary value such as 2.56 trajectories per second must not fail for the last bit of a double."""

SECONDS_PER_H = 3600.0


class Infeasible(UserError):
    """A relation that cannot hold as things are: ``broken`` is it with its numbers, ``advice`` the nearest way out."""

    def __init__(self, broken: str, advice: str) -> None:
        self.broken = broken
        super().__init__(f"{broken}: {advice}")


def overlap_holds(
    *, t_train_s: float, t_bcast_s: float, publish_period: int, rollouts_per_step: int, mu_pool_per_s: float
) -> bool:
    """Equation (1): kappa·T_train ≥ T_bcast + kappa·R / Σmu.

    True when a publish period is long enough to send a snapshot and then to generate the period's trajectories, so
    the learner need not wait. A period that the dissemination alone fills never overlaps.
    """
    _check_timing(t_train_s, t_bcast_s, publish_period, rollouts_per_step)
    generating_s = publish_period * t_train_s - t_bcast_s
    needed = publish_period * rollouts_per_step
    return generating_s > 0 and mu_pool_per_s * generating_s >= needed * (1 - RELATIVE_TOLERANCE)


def mu_min(*, t_train_s: float, t_bcast_s: float, publish_period: int, rollouts_per_step: int) -> float:
    """Equation (2): mu_min(kappa) = kappa·R / (kappa·T_train − T_bcast), the smallest pool rate that satisfies (1).

    Conservative: it charges dissemination as time in which no worker generates.

    Raises Infeasible unless kappa·T_train > T_bcast.
    """
    _check_timing(t_train_s, t_bcast_s, publish_period, rollouts_per_step)
    generating_s = publish_period * t_train_s - t_bcast_s
    if generating_s <= publish_period * t_train_s * RELATIVE_TOLERANCE:
        nearest = math.floor(t_bcast_s / t_train_s * (1 + RELATIVE_TOLERANCE)) + 1
        raise Infeasible(
            f"kappa * T_train must exceed T_bcast, got {publish_period} * {t_train_s:g} s = "
            f"{publish_period * t_train_s:g} s against {t_bcast_s:g} s",
            f"publish every {nearest} steps or more (staleness budget {nearest + 1} or more), or bring T_bcast below "
            f"{publish_period * t_train_s:g} s",
        )
    return publish_period * rollouts_per_step / generating_s


def mu_min_overlapped(
    *,
    t_train_s: float,
    t_bcast_s: float,
    t_gen_s: float,
    staleness_budget: int,
    publish_period: int,
    rollouts_per_step: int,
) -> float:
    """Equation (2′), ours: mu ≥ R / min(T_train, (S − kappa + 1)·T_train − T_bcast − T_gen).

    Workers keep generating under the old snapshot while the new one travels, so dissemination costs capacity only
    where the old snapshot's trajectories would leave the staleness budget first. T_gen is the time to finish a group.
    Derived for a buffer that hands out the oldest admissible trajectories first.

    Raises Infeasible unless (S − kappa + 1)·T_train > T_bcast + T_gen.
    """
    _check_timing(t_train_s, t_bcast_s, publish_period, rollouts_per_step)
    _check_staleness(t_gen_s, staleness_budget)
    periods = staleness_budget - publish_period + 1
    late_s = t_bcast_s + t_gen_s
    fresh_s = periods * t_train_s - late_s
    if fresh_s <= abs(periods) * t_train_s * RELATIVE_TOLERANCE:
        nearest = math.floor(late_s / t_train_s * (1 + RELATIVE_TOLERANCE)) + publish_period
        raise Infeasible(
            f"(S - kappa + 1) * T_train must exceed T_bcast + T_gen, got ({staleness_budget} - {publish_period} + 1) * "
            f"{t_train_s:g} s = {periods * t_train_s:g} s against {t_bcast_s:g} s + {t_gen_s:g} s = {late_s:g} s",
            f"raise the staleness budget to {nearest} or more, publish more often, or shorten T_bcast or T_gen",
        )
    return rollouts_per_step / min(t_train_s, fresh_s)


def step_period_s(
    *,
    t_train_s: float,
    t_bcast_s: float,
    t_gen_s: float,
    staleness_budget: int,
    publish_period: int,
    rollouts_per_step: int,
    mu_pool_per_s: float,
) -> float:
    """The inverse of (2′), ours: the mean time from step to step that a pool of rate mu allows, T_train at best.

    With r = R/mu, q = max(T_train, r) and k = ⌈(S − kappa + 2)/kappa⌉,

        period = q + max(0, T_train + T_bcast + T_gen + r − (S − kappa + 2)·q) / (k·kappa)

    Steps begin at least T_train apart. From step (m − 1)·kappa + S + 1 on, nothing older than the m-th publish is
    admissible. It happens as step m·kappa − 1 ends, its first trajectories are delivered T_bcast + T_gen later and R of
    them every r seconds, so the a-th of those steps begins at least T_train + T_bcast + T_gen + a·r after step
    m·kappa − 1 began, which is S − kappa + 1 + a steps earlier. No other constraint exists for a buffer that hands out
    the oldest admissible first, and the period is the largest mean over a cycle of these two (a max-plus system): the
    wait for fresh trajectories is paid once in k publishes. It equals T_train exactly where mu satisfies (2′).

    Assumes that a publish has arrived before the next one begins (T_bcast ≤ kappa·period).
    Raises Infeasible when nothing generates or kappa > S + 1, at which the learner would wait for ever.
    """
    _check_timing(t_train_s, t_bcast_s, publish_period, rollouts_per_step)
    _check_staleness(t_gen_s, staleness_budget)
    _check_pool(mu_pool_per_s)
    slots = staleness_budget - publish_period + 2
    if slots < 1:
        raise Infeasible(
            f"kappa must be at most S + 1, got kappa = {publish_period} with S = {staleness_budget}",
            f"publish every {staleness_budget + 1} steps or more often",
        )
    batch_s = rollouts_per_step / mu_pool_per_s
    busy_s = max(t_train_s, batch_s)
    late_s = t_train_s + t_bcast_s + t_gen_s + batch_s - slots * busy_s
    if late_s <= slots * busy_s * RELATIVE_TOLERANCE:
        return busy_s
    return busy_s + late_s / (math.ceil(slots / publish_period) * publish_period)


def predicted_bubble_ratio(*, t_train_s: float, period_s: float) -> float:
    """Share of the time in which the learner waits when steps of T_train begin every ``period_s`` seconds."""
    idle_s = period_s - t_train_s
    return bubble_ratio(idle_s=idle_s if idle_s > period_s * RELATIVE_TOLERANCE else 0.0, training_s=t_train_s)


def pool_rate(rates_per_s: Mapping[str, float], available: Iterable[str]) -> float:
    """Equation (4): mu_pool(t) = Σ a_i(t)·mu_i(t), with a_i = 1 for the names in ``available`` (heartbeats)."""
    alive = set(available)
    return math.fsum(rate for name, rate in rates_per_s.items() if name in alive)


def fresh_rollouts(steps_after_publish: int, *, t_train_s: float, t_bcast_s: float, mu_pool_per_s: float) -> float:
    """Equation (5): F(j) = mu_pool·max(0, j·T_train − T_bcast), new trajectories j steps after a publish."""
    return mu_pool_per_s * max(0.0, steps_after_publish * t_train_s - t_bcast_s)


def first_usable_step(*, t_train_s: float, t_bcast_s: float, rollouts_per_step: int, mu_pool_per_s: float) -> int:
    """Equation (6): the first j with F(j) ≥ R, that is j = ⌈(T_bcast + R/mu_pool) / T_train⌉.

    Raises Infeasible when nothing generates.
    """
    _check_timing(t_train_s, t_bcast_s, 1, rollouts_per_step)
    _check_pool(mu_pool_per_s)
    return _ceil((t_bcast_s + rollouts_per_step / mu_pool_per_s) / t_train_s)


def staleness_bound(
    *, t_train_s: float, t_bcast_s: float, publish_period: int, rollouts_per_step: int, mu_pool_per_s: float
) -> int:
    """Equation (7): Δmax ≤ kappa + ⌈(T_bcast + R/mu_pool) / T_train⌉ − 1, in training steps.

    Raises Infeasible when nothing generates.
    """
    _check_timing(t_train_s, t_bcast_s, publish_period, rollouts_per_step)
    first = first_usable_step(
        t_train_s=t_train_s, t_bcast_s=t_bcast_s, rollouts_per_step=rollouts_per_step, mu_pool_per_s=mu_pool_per_s
    )
    return publish_period + first - 1


@lru_cache(maxsize=256)  # asked at every lease, with times that change once a step
def staleness_bound_tight(*, t_train_s: float, t_bcast_s: float, publish_period: int, t_gen_s: float = 0.0) -> int:
    """Equation (12): Δmax ≤ kappa + ⌈(1 − 1/kappa)·T_bcast / T_train⌉, in training steps; valid where (1) holds.

    t_gen_s: time to finish a group, which the paper leaves out; what is generated that long is that much older.
    """
    _check_timing(t_train_s, t_bcast_s, publish_period, 1)
    _check_staleness(t_gen_s, 0)
    return publish_period + _ceil(((1 - 1 / publish_period) * t_bcast_s + t_gen_s) / t_train_s)


def cost_usd(machines: Iterable[tuple[float, float]]) -> float:
    """The paper's cost metric: Σ price·hours over (USD per hour, seconds rented) of every machine."""
    return math.fsum(usd_per_h * seconds / SECONDS_PER_H for usd_per_h, seconds in machines)


def bubble_ratio(*, idle_s: float, training_s: float) -> float:
    """The paper's bubble metric: T_idle / (T_idle + T_train,active); 0 before anything happened."""
    total_s = idle_s + training_s
    return idle_s / total_s if total_s > 0 else 0.0


def _ceil(value: float) -> int:
    nearest = round(value)
    return nearest if math.isclose(value, nearest, rel_tol=RELATIVE_TOLERANCE) else math.ceil(value)


def _check_timing(t_train_s: float, t_bcast_s: float, publish_period: int, rollouts_per_step: int) -> None:
    _require(t_train_s > 0 and math.isfinite(t_train_s), f"T_train must be more than 0 s, got {t_train_s:g}")
    _require(t_bcast_s >= 0 and math.isfinite(t_bcast_s), f"T_bcast must be at least 0 s, got {t_bcast_s:g}")
    _require(publish_period >= 1, f"the publish period must be at least 1 step, got {publish_period}")
    _require(rollouts_per_step >= 1, f"a step must consume at least 1 trajectory, got {rollouts_per_step}")


def _check_staleness(t_gen_s: float, staleness_budget: int) -> None:
    _require(t_gen_s >= 0 and math.isfinite(t_gen_s), f"T_gen must be at least 0 s, got {t_gen_s:g}")
    _require(staleness_budget >= 0, f"the staleness budget must be at least 0, got {staleness_budget}")


def _check_pool(mu_pool_per_s: float) -> None:
    if not mu_pool_per_s > 0:
        raise Infeasible(f"the pool must deliver more than 0 trajectories/s, got {mu_pool_per_s:g}", "add a worker")


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)

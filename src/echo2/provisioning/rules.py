"""What the controller holds to, and how much capacity that asks for.

Invariant: a ``Rules`` value is in range however it was made; ``requirement`` is a positive rate or an ``Infeasible``
sentence, never a guess.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Literal

import msgspec

from echo2.errors import UserError
from echo2.provisioning.demand import Cadence, Demand, Rule, Times
from echo2.provisioning.observation import Observation
from echo2.provisioning.offers import Terms

Policy = Literal["cheapest", "exact", "random"]

_MOST_OF_DEMAND = 2.0
"""Times R / T_train, what the learner consumes. Where T_bcast and T_gen leave little of S, (2′) asks for any number
of machines to make the first batch of a publish in no time. With twice what is consumed at most T_train / (2·k·kappa)
of a step is left to wait, k as in ``capacity.step_period_s``."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """Constant through a run. Raises UserError for a value out of range."""

    rollouts_per_step: int
    staleness_budget: int
    publish_period: int
    gamma: float = 1.1
    """The target is gamma·mu_min."""
    rule: Rule = "overlapped"
    """``overlapped``: equation (2′), workers generate while a snapshot travels; ``paper``: equation (2)."""
    policy: Policy = "cheapest"
    """How machines are chosen; ``random`` (NoCost) draws them by ``seed``, and those to release too."""
    seed: int = 0
    terms: Terms = Terms()
    period_s: float = 60.0
    """A decision period: deviations are judged once in it."""
    sustain: int = 3
    """Decision periods that a deviation must last. One that is absent now and then takes a period back, so a single
    odd one neither starts nor stops anything."""
    cool_down_s: float = 180.0
    """No further change so long after one; what was lost is replaced all the same."""
    start_s: float = 600.0
    """A machine that takes longer to join is given up."""
    back_off_s: float = 120.0
    """An offer whose machine did not come up is left alone so long; twice as long after each further one."""
    max_price_age_s: float = 3600.0
    """A price that was true so long ago is unknown (I01)."""
    saving: float = 0.2
    """Share of its cost that replacing a machine must save."""
    first_machines: int = 1
    """Held while there is no target: steps must be trained to profile T_train. 0 where that needs no workers."""
    budget_usd: float = 0.0
    """The run ends, in order, before it has cost more; 0 means no cap."""
    end_s: float = 360.0
    """How long ending in order takes at most: it is paid for out of the budget."""

    def __post_init__(self) -> None:
        scipy = self.policy != "exact" or importlib.util.find_spec("scipy") is not None
        _hold(scipy, 'the policy "exact" needs SciPy, which is not installed: install echo2[exact], or use "cheapest"')
        _hold(self.gamma >= 1 and math.isfinite(self.gamma), f"gamma must be at least 1, got {self.gamma:g}")
        _hold(self.rollouts_per_step >= 1, f"a step must consume at least 1 trajectory, got {self.rollouts_per_step}")
        for name in ("period_s", "start_s", "back_off_s", "max_price_age_s"):
            value = getattr(self, name)
            _hold(value > 0 and math.isfinite(value), f"{name} must be more than 0 s, got {value:g}")
        for name in ("cool_down_s", "budget_usd", "end_s"):
            value = getattr(self, name)
            _hold(value >= 0 and math.isfinite(value), f"{name} must be at least 0, got {value:g}")
        _hold(self.sustain >= 1, f"a deviation must last at least 1 decision period, got {self.sustain}")
        _hold(0 < self.saving < 1, f"the saving must be a share between 0 and 1, got {self.saving:g}")
        _hold(self.first_machines >= 0, f"first_machines must be at least 0, got {self.first_machines}")

    def with_traffic(self, received_gb_per_h: float) -> Rules:
        """The same where a worker receives so much."""
        return msgspec.structs.replace(self, terms=Terms(received_gb_per_h, self.terms.rental_h))


class Requirement(msgspec.Struct, frozen=True):
    """Trajectories per second that the pool must deliver."""

    mu_min_per_s: float
    mu_target_per_s: float
    """gamma·mu_min."""
    because: str
    """The numbers it came from, for people."""
    settled: bool
    """T_bcast was measured; until then this is the least that will be needed."""


def requirement(seen: Observation, rules: Rules) -> Requirement | None:
    """By the chosen rule at the measured times; None before T_train is known.

    An unknown T_bcast or T_gen counts as 0 s, which asks for the least: machines rented for that are never too many.
    Raises Infeasible when no pool could be large enough.
    """
    if seen.t_train_s is None:
        return None
    times = Times(
        t_train_s=seen.t_train_s,
        t_bcast_s=seen.t_bcast_s or 0.0,
        t_gen_s=seen.t_gen_s or 0.0,
        rollouts_per_step=rules.rollouts_per_step,
    )
    demand = Demand(times=times, rule=rules.rule, gamma=rules.gamma)
    asked = demand.required_per_s(Cadence(rules.staleness_budget, rules.publish_period))
    most = _MOST_OF_DEMAND * rules.rollouts_per_step / seen.t_train_s
    least = min(asked, most) if rules.rule == "overlapped" else asked
    bcast = "not measured yet" if seen.t_bcast_s is None else f"{times.t_bcast_s:.3g} s"
    because = (
        f"the target is {rules.gamma:g} x {least:.3g} = {rules.gamma * least:.3g} trajectories/s "
        f"({rules.rule} rule, T_train {seen.t_train_s:.3g} s, T_bcast {bcast})"
    )
    if least < asked:
        because += (
            f"; the {asked:.3g} that (2′) asks for would help little more, because T_bcast and T_gen use up S: "
            "raise it, or publish more often"
        )
    return Requirement(least, rules.gamma * least, because, seen.t_bcast_s is not None)


def _hold(condition: bool, sentence: str) -> None:
    if not condition:
        raise UserError(sentence)

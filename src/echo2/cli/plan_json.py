"""What ``echo2 plan --json`` prints.

Invariant: the same names whether there is a plan or not; what has no value is null. ``cost_usd_per_h`` is all that is
paid an hour, workers with their traffic and the learner where its price is known; its parts stand beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from echo2.cli.plan_view import remarks
from echo2.provisioning.demand import Cadence, overlap_holds, staleness_bounds
from echo2.provisioning.plan import required_rates
from echo2.provisioning.question import Afford, Rent, Use

if TYPE_CHECKING:
    from echo2.cli.plan_inputs import Inputs
    from echo2.provisioning.plan import Plan
    from echo2.provisioning.selection import Pick
    from echo2.provisioning.ways_out import Way


def facts(inputs: Inputs, plan: Plan, surveyed: Sequence[Plan], faster: Plan) -> dict[str, Any]:
    """A plan."""
    conservative, tight = staleness_bounds(plan.demand.times, plan.cadence, plan.mu_selected_per_s)
    priced = bool(plan.picks)
    return {
        "feasible": True,
        **_asked(inputs),
        "staleness_budget": plan.cadence.staleness_budget,
        "publish_period": plan.cadence.publish_period,
        "mu_min_per_s": plan.mu_min_per_s,
        "mu_min_overlapped_per_s": plan.mu_min_overlapped_per_s,
        "mu_target_per_s": plan.mu_target_per_s,
        "staleness_bound": conservative,
        "staleness_bound_tight": tight,
        "overlap_holds": overlap_holds(plan.demand.times, plan.cadence, plan.mu_selected_per_s),
        "selected": [_picked(pick) for pick in plan.picks],
        "estimated": plan.estimated,
        "mu_selected_per_s": plan.mu_selected_per_s,
        "saturated": plan.is_enough,
        "workers_usd_per_h": plan.workers_usd_per_h if priced else None,
        "learner_usd_per_h": inputs.learner_usd_per_h,
        "cost_usd_per_h": plan.workers_usd_per_h + inputs.learner_usd_per_h if priced else None,
        "cost_usd_per_step": plan.usd_per_step(inputs.learner_usd_per_h) if priced else None,
        "step_s": plan.step_s,
        "predicted_bubble_ratio": plan.bubble_ratio,
        "tenth_of_t_bcast": {
            "t_bcast_s": faster.demand.times.t_bcast_s,
            "publish_period": faster.cadence.publish_period,
            "mu_target_per_s": faster.mu_target_per_s,
            "step_s": faster.step_s,
            "predicted_bubble_ratio": faster.bubble_ratio,
            "saves_usd_per_h": plan.workers_usd_per_h - faster.workers_usd_per_h if priced else None,
        },
        "surveyed": [_brief(one) for one in surveyed],
        "notes": [*inputs.notes, *remarks(inputs, plan)],
    }


def refusal(inputs: Inputs, surveyed: Sequence[Plan], reason: str, ways: Sequence[Way]) -> dict[str, Any]:
    """No plan, and what would make one."""
    ask = inputs.ask
    absent = (
        "staleness_bound", "staleness_bound_tight", "mu_selected_per_s", "cost_usd_per_h", "cost_usd_per_step",
        "predicted_bubble_ratio",
    )  # fmt: skip
    period = ask.publish_period if isinstance(ask.publish_period, int) else None
    if ask.publish_period == "default" and ask.staleness_budget is not None:
        period = ask.staleness_budget - 1
    paper, overlapped = None, None
    if period is not None and ask.staleness_budget is not None:
        paper, overlapped = required_rates(ask.demand, Cadence(ask.staleness_budget, period))
    required = paper if ask.demand.rule == "paper" else overlapped
    return {
        "feasible": False,
        **_asked(inputs),
        "staleness_budget": ask.staleness_budget,
        "publish_period": period,
        "mu_min_per_s": paper,
        "mu_min_overlapped_per_s": overlapped,
        "mu_target_per_s": None if required is None else ask.demand.gamma * required,
        **dict.fromkeys(absent),
        "selected": [],
        "reason": reason,
        "ways_out": [
            {field: value for field, value in msgspec.to_builtins(way).items() if value not in (None, "")}
            for way in ways
        ],
        "surveyed": [_brief(one) for one in surveyed],
        "notes": list(inputs.notes),
    }


def _asked(inputs: Inputs) -> dict[str, Any]:
    demand, question = inputs.ask.demand, inputs.question
    names = {Rent: "rent", Afford: "budget", Use: "pool"}
    return {
        "question": names[type(question)],
        "rule": demand.rule,
        "gamma": demand.gamma,
        "policy": question.policy if isinstance(question, Rent) else None,
        **msgspec.to_builtins(demand.times),
        "origins": inputs.origins,
        "bytes_per_publish": inputs.market.bytes_per_publish or None,
    }


def _picked(pick: Pick) -> dict[str, Any]:
    offer = pick.offer
    return {
        "name": offer.name,
        "gpu": offer.gpu,
        "count": pick.machines,
        "usd_per_h": offer.usd_per_h,
        "rollouts_per_s": offer.rollouts_per_s,
        "estimated": offer.estimated,
        "total_usd_per_h": pick.usd_per_h,
        "total_mu_per_s": pick.mu_per_s,
    }


def _brief(plan: Plan) -> dict[str, Any]:
    return {
        "staleness_budget": plan.cadence.staleness_budget,
        "publish_period": plan.cadence.publish_period,
        "feasible": plan.is_enough,
        "mu_required_per_s": plan.required_per_s,
        "step_s": plan.step_s,
        "predicted_bubble_ratio": plan.bubble_ratio,
    }

"""What ``echo2 plan`` shows people.

Invariant: it fits eighty columns, and every estimate and assumption that it rests on is named as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo2.provisioning.demand import overlap_holds, staleness_bounds
from echo2.provisioning.offers import download_s
from echo2.provisioning.question import Afford, Rent, Use
from echo2.report.progress import rate, usd

if TYPE_CHECKING:
    from echo2.cli.plan_inputs import Inputs
    from echo2.provisioning.plan import Plan

SHOWN_PICKS = 20
SHOWN_SURVEYED = 20


def view(inputs: Inputs, plan: Plan, found: Sequence[Plan], faster: Plan) -> RenderableType:
    """The whole answer."""
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True)
    facts.add_column()
    for name, text in _facts(inputs, plan, faster):
        facts.add_row(Text(name), Text(text))
    parts: list[RenderableType] = [facts]
    if found:
        parts += [Text(), surveyed(found)]
    if plan.picks:
        parts += [Text(), _picks(plan)]
    notes = [*inputs.notes, *remarks(inputs, plan)]
    if notes:
        listed = Table.grid(padding=(0, 1, 0, 0))
        for text in notes:
            listed.add_row(Text("-"), Text(text))
        parts += [Text(), listed]
    return Group(*parts)


def surveyed(found: Sequence[Plan]) -> RenderableType:
    """What a pool does at each (S, kappa); the best kappa of each S where there are many."""
    shown = list(found)
    if len(shown) > SHOWN_SURVEYED:
        best: dict[int, Plan] = {}
        for plan in shown:
            known = best.get(plan.cadence.staleness_budget)
            if known is None or plan.bubble_ratio < known.bubble_ratio - 1e-9:
                best[plan.cadence.staleness_budget] = plan
        shown = list(best.values())[:SHOWN_SURVEYED]
    table = Table("S", "kappa", "required /s", "step s", "bubble", "enough", box=None, pad_edge=False)
    for column in table.columns[:5]:
        column.justify = "right"
    for plan in shown:
        required = "-" if plan.required_per_s is None else rate(plan.required_per_s)
        table.add_row(
            str(plan.cadence.staleness_budget), str(plan.cadence.publish_period), required,
            f"{plan.step_s:.1f}", f"{plan.bubble_ratio:.1%}", "yes" if plan.is_enough else "no",
        )  # fmt: skip
    return table


def _facts(inputs: Inputs, plan: Plan, faster: Plan) -> list[tuple[str, str]]:
    times, cadence, origins = plan.demand.times, plan.cadence, inputs.origins
    rows = [
        ("staleness", f"S = {cadence.staleness_budget}, kappa = {cadence.publish_period}"),
        ("planned lag", _bounds(plan)),
        ("step", f"R = {times.rollouts_per_step} trajectories, T_train {times.t_train_s:g} s"),
        ("publish", f"T_bcast {times.t_bcast_s:.6g} s, T_gen {times.t_gen_s:.6g} s{_size(inputs)}"),
        ("required", f"{_rate(plan.mu_min_per_s)} by (2), {_rate(plan.mu_min_overlapped_per_s)} by (2')"),
        ("target", f"{_rate(plan.mu_target_per_s)} = {plan.demand.gamma:g} x {_RULES[plan.demand.rule]}"),
        ("pool", f"{_rate(plan.mu_selected_per_s)}{' (estimated)' if plan.estimated else ''}"),
        ("predicted", f"step {plan.step_s:.6g} s, bubble {plan.bubble_ratio:.1%}"),
    ]
    measured = [f"{_NAMES[name]} {origin}" for name, origin in origins.items() if origin != "given"]
    if measured:
        rows.insert(4, ("origin", "; ".join(measured)))
    if plan.picks:
        rows.append(("cost", _cost(inputs, plan)))
    return [*rows, ("T_bcast / 10", _tenth(inputs, plan, faster))]


_RULES = {"paper": "(2)", "overlapped": "(2')"}
_NAMES = {"t_train_s": "T_train", "t_bcast_s": "T_bcast", "t_gen_s": "T_gen"}


def _bounds(plan: Plan) -> str:
    conservative, tight = staleness_bounds(plan.demand.times, plan.cadence, plan.mu_selected_per_s)
    holds = overlap_holds(plan.demand.times, plan.cadence, plan.mu_selected_per_s)
    return f"{conservative} by (7), {tight} by (12){'' if holds else ', which presumes (1), and it does not hold'}"


def _size(inputs: Inputs) -> str:
    size = inputs.market.bytes_per_publish
    told = f"{size / 1e9:.4g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
    return f", {told} to each worker" if size else ""


def _cost(inputs: Inputs, plan: Plan) -> str:
    learner = inputs.learner_usd_per_h
    workers = plan.workers_usd_per_h
    whom = f" (workers {usd(workers)}, learner {usd(learner)})" if learner else " for workers, without the learner"
    return f"{usd(workers + learner)}/h{whom}; {usd(plan.usd_per_step(learner))} a step"


def _tenth(inputs: Inputs, plan: Plan, faster: Plan) -> str:
    head = f"{faster.demand.times.t_bcast_s:.4g} s would"
    if isinstance(inputs.question, Rent):
        saved = plan.workers_usd_per_h - faster.workers_usd_per_h
        change = f"need {_rate(faster.mu_target_per_s)}"
        return f"{head} {change} and save {usd(saved)}/h" if saved > 0 else f"{head} {change} and save nothing"
    if isinstance(inputs.question, Afford):
        saved = plan.workers_usd_per_h - faster.workers_usd_per_h
        less = f" for {usd(saved)}/h less" if saved > 0 else ""
        return f"{head} make a step of {faster.step_s:.6g} s{less}"
    assert isinstance(inputs.question, Use)
    return f"{head} make a bubble of {faster.bubble_ratio:.1%}"


def _picks(plan: Plan) -> Table:
    table = Table("machines", "offer", "GPU", "USD/h each", "USD/h", "per s", "", box=None, pad_edge=False)
    for index in (0, 3, 4, 5):
        table.columns[index].justify = "right"
    for index in (0, 2, 3, 4, 5, 6):
        table.columns[index].no_wrap = True
    table.columns[1].overflow = "fold"
    for pick in plan.picks[:SHOWN_PICKS]:
        offer = pick.offer
        table.add_row(
            str(pick.machines), Text(offer.name), Text(offer.gpu), f"{pick.usd_per_h / pick.machines:.3f}",
            f"{pick.usd_per_h:.2f}", rate(pick.mu_per_s), "estimate" if offer.estimated else "",
        )  # fmt: skip
    if (more := len(plan.picks) - SHOWN_PICKS) > 0:
        table.add_row(str(sum(pick.machines for pick in plan.picks[SHOWN_PICKS:])), f"in {more} more offers")
    return table


def remarks(inputs: Inputs, plan: Plan) -> list[str]:
    """What makes a figure of the table differ from the offer's own, and what is odd about a machine."""
    told = []
    received = inputs.market.terms(plan.demand.times.t_train_s, plan.cadence.publish_period).received_gb_per_h
    if any(pick.offer.traffic_usd_per_gb for pick in plan.picks) and received:
        told.append(f"USD/h is rent and traffic: {received:.3g} GB/h reach each machine")
    if any(pick.offer.min_rental_h > inputs.market.rental_h for pick in plan.picks):
        told.append("USD/h pays for a whole minimum rental within the hours of --rental-h")
    if any(pick.offer.reliability < 1 for pick in plan.picks):
        told.append("per s counts the share of the time that a machine is up (reliability)")
    return [*told, *_slow(inputs, plan)]


def _slow(inputs: Inputs, plan: Plan) -> list[str]:
    """Machines whose own line takes longer than T_bcast."""
    size, t_bcast_s = inputs.market.bytes_per_publish, plan.demand.times.t_bcast_s
    slow = [
        f"{pick.offer.name} takes {seconds:.4g} s to download a publish, longer than T_bcast"
        for pick in plan.picks
        if size and (seconds := download_s(pick.offer, size)) is not None and seconds > t_bcast_s * (1 + 1e-9)
    ]
    return [*slow[:3], f"and {len(slow) - 3} more that are as slow"] if len(slow) > 3 else slow


def _rate(per_s: float | None) -> str:
    return "none" if per_s is None else f"{rate(per_s)}/s"

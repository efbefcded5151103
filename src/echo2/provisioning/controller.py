"""The closed loop: hold the learner saturated at the least cost (paper §3.5, §4.3, B.2.1), as a pure state machine.

    observation ─▶ roster (who came, who went) ─▶ market (what may be ordered) ─▶ one decision, with its reason

Invariants:
- nothing is released unless what stays active, without anything that is only on its way, surely delivers the target
  gamma·mu_min and a band above it (``excess``);
- a machine counts once from its order to its end, and an order is for what is missing beyond all that is on its way;
- decisions do not depend on the order of offers or machines, and no clock, I/O or random state is in here.

What makes it act, in this order:
1. the budget: past what ending in order costs, it ends the run (``budget``);
2. a loss: machines that went away or did not start are replaced at once, whatever else was done lately;
3. a shortage that lasts (or that there is when the target is first known): planned capacity below the target by more
   than the noise of the estimates, or below mu_min;
4. an excess that lasts: the dearest machines go, as far as the first invariant allows;
5. a machine that others could replace at much less: they are activated, and the excess they make releases it later.

3 to 5 must last ``Rules.sustain`` decision periods and ``Rules.cool_down_s`` must have passed since the last change.
Between a shortage and an excess lies a band, so that noise alone moves nothing back and forth (field report I03).

Before T_train is known, and while no pool could be large enough, ``Rules.first_machines`` are held, so that there are
steps to take the times from, and nothing is released; nor is it while T_bcast is unknown.
"""

from __future__ import annotations

import math

import msgspec

from echo2.provisioning import budget, excess
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.decisions import Decision, End, Keep, Release
from echo2.provisioning.excess import Replacement
from echo2.provisioning.market import choose, expected_of, learned_of, least_dear, open_offers
from echo2.provisioning.observation import Observation, merged
from echo2.provisioning.orders import Picks, place, why_nothing
from echo2.provisioning.roster import Happened, Roster
from echo2.provisioning.rules import Requirement, Rules, requirement
from echo2.provisioning.tariff import Tariff
from echo2.provisioning.view import SLACK, View, view_of

_PERIOD_SLACK = 0.1
"""Share of a decision period by which a look may come early and still count as the next one."""
_LOSSES_TOLD = 5
"""Newest losses that a reason names."""
_SWAP_PATIENCE_S = 3600.0
"""A replacement may take so long to lead to a release before another one is tried."""


class Periods(msgspec.Struct, frozen=True):
    """Decision periods that each deviation has lasted, less those in which it was absent."""

    short: int = 0
    spare: int = 0
    dear: int = 0

    def judged(self, most: int, *, short: bool, spare: bool, dear: bool) -> Periods:
        return Periods(
            _counted(self.short, most, short), _counted(self.spare, most, spare), _counted(self.dear, most, dear)
        )


class State(msgspec.Struct, frozen=True):
    """All that the controller remembers; plain data that can be stored."""

    roster: Roster = Roster()
    tariff: Tariff = Tariff()
    learned: dict[str, dict[str, float]] = {}
    """``market.Learned``"""
    periods: Periods = Periods()
    judged_s: float = -math.inf
    acted_s: float = -math.inf
    lost: tuple[str, ...] = ()
    """Machines that went away and are not replaced yet, in words."""
    swapped: tuple[str, ...] = ()
    """Machines that the last replacement was for."""
    swapped_s: float = -math.inf
    ending: bool = False

    def carried_over(self, saved_s: float, now_s: float, down_s: float) -> State:
        """The same after a restart. ``saved_s``: when this value was written, on the old clock; ``now_s``: now, on the
        new one; ``down_s``: real time between the two. An end that was decided is decided anew, so that it is heard."""
        shift_s = now_s - max(0.0, down_s) - saved_s
        return msgspec.structs.replace(
            self,
            roster=self.roster.moved(shift_s),
            tariff=self.tariff.moved(shift_s),
            judged_s=self.judged_s + shift_s,
            acted_s=self.acted_s + shift_s,
            swapped_s=self.swapped_s + shift_s,
            ending=False,
        )


def decide(state: State, seen: Observation, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    """What to do now. May be called more often than once in a decision period, for instance when a machine is lost."""
    seen = msgspec.structs.replace(seen, machines=merged(seen.machines))
    rules = rules.with_traffic(seen.received_gb_per_h)
    state, happened = _look(state, seen, rules)
    stopped, state = _give_up(state, seen, happened, rules)
    if state.ending or seen.ending:
        return state, (*stopped, Keep("the run is ending: nothing is activated any more"))
    offers = open_offers(seen, state.roster, state.tariff, state.learned, rules)
    view = view_of(seen, state.roster, offers, expected_of(seen, state.learned))
    if (why := budget.over(view.standing, rules)) is not None:
        return msgspec.structs.replace(state, ending=True), (*stopped, End(why))
    try:
        need = requirement(seen, rules)
    except Infeasible as error:
        # More is needed than any pool has: no time of excess, and no end of a shortage either.
        calm = msgspec.structs.replace(state, periods=Periods(short=state.periods.short))
        state, decisions = _hold_first(calm, view, f"no pool can be large enough: {error}", rules)
    else:
        if need is None:
            state, decisions = _hold_first(state, view, "T_train is not known yet", rules)
        else:
            state, decisions = _hold_target(state, view, need, rules)
    return state, (*stopped, *decisions)


def _look(state: State, seen: Observation, rules: Rules) -> tuple[State, Happened]:
    """Take in what happened since the last look."""
    learned = learned_of(state.learned, seen)
    roster, happened = state.roster.update(seen, expected_of(seen, learned), rules)
    lost = (*state.lost, *(f"{name} went away" for name in happened.lost))
    lost = (*lost, *(f"{name} did not start" for name in happened.failed))[-_LOSSES_TOLD:]
    tariff = state.tariff.learn(seen.listings, seen.now_s)
    return msgspec.structs.replace(state, roster=roster, tariff=tariff, learned=dict(learned), lost=lost), happened


def _give_up(state: State, seen: Observation, happened: Happened, rules: Rules) -> tuple[tuple[Release, ...], State]:
    """Machines that cost money and do not work: those whose deadline passed, and those long silent."""
    offers = {machine.machine_id: machine.offer for machine in seen.machines}
    longest_s = rules.sustain * rules.period_s
    stopped = [
        Release(name, offers.get(name, name.rpartition("-")[0]), "its worker did not join by the deadline of its start")
        for name in happened.overdue
    ]
    for name, since_s in sorted(state.roster.silent_since_s.items()):
        if offers[name] and seen.now_s - since_s >= longest_s:
            silent_s = seen.now_s - since_s
            stopped.append(Release(name, offers[name], f"it is paid for and was silent for {silent_s:.0f} s"))
    roster = state.roster.dismiss(*(release.machine_id for release in stopped))
    return tuple(stopped), msgspec.structs.replace(state, roster=roster)


def _hold_first(state: State, view: View, why: str, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    """Without a target: what there is stays, and a few machines at least, so that steps are trained and times taken."""
    held = len(view.active) + len(state.roster.starts)
    missing = rules.first_machines - held
    why = f"{why}; {held} machines are there, at least {rules.first_machines} are held"
    if missing <= 0:
        return msgspec.structs.replace(state, lost=()), (Keep(why),)
    return _activate(state, view, least_dear(view.open.offers, missing, rules), why, rules)


def _hold_target(state: State, view: View, need: Requirement, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    spare = excess.releasable(view, need, rules, _swapping(state, view)) if need.settled else []
    dear = excess.replacement(view, need, rules) if _may_swap(state, view, need, spare) else None
    first = math.isinf(state.judged_s)
    state = _judge(state, view, need, rules, spare=bool(spare), dear=dear is not None)
    missing = need.mu_target_per_s - view.planned.mean_per_s
    covered = missing <= need.mu_target_per_s * SLACK
    nobody = not view.active and not state.roster.starts
    if covered:
        state = msgspec.structs.replace(state, lost=())
    told = f"{view.sentence}; {need.because}"
    cooled = view.seen.now_s - state.acted_s >= rules.cool_down_s
    periods = state.periods
    if first and is_short(view, need):
        return _cover(state, view, missing, f"the target is known for the first time; {told}", rules)
    if not covered and (state.lost or nobody):
        why = "; ".join(state.lost) or "no machine is there"
        return _cover(state, view, missing, f"{why}; {told}", rules)
    if periods.short >= rules.sustain and cooled and not covered:
        why = f"short of the target by {missing:.3g} trajectories/s for {periods.short} decision periods; {told}"
        return _cover(state, view, missing, why, rules)
    if periods.spare >= rules.sustain and cooled and spare:
        return _release(state, view, spare, f"more than enough for {periods.spare} decision periods; {told}")
    if periods.dear >= rules.sustain and cooled and dear is not None:
        return _swap(state, view, dear, told, rules)
    return state, (Keep(_kept(periods, cooled=cooled, covered=covered, told=told)),)


def _judge(state: State, view: View, need: Requirement, rules: Rules, *, spare: bool, dear: bool) -> State:
    """Count this decision period, once."""
    if view.seen.now_s - state.judged_s < rules.period_s * (1 - _PERIOD_SLACK):
        return state
    periods = state.periods.judged(rules.sustain, short=is_short(view, need), spare=spare, dear=dear)
    return msgspec.structs.replace(state, periods=periods, judged_s=view.seen.now_s)


def is_short(view: View, need: Requirement) -> bool:
    """What is active and on its way misses the target by more than a standard deviation, or the whole of the margin."""
    planned = view.planned
    missed = planned.mean_per_s < need.mu_target_per_s * (1 - SLACK)
    certain = planned.upper_per_s() < need.mu_target_per_s * (1 - SLACK)
    return missed and (certain or planned.mean_per_s < need.mu_min_per_s * (1 - SLACK))


def _may_swap(state: State, view: View, need: Requirement, spare: list[str]) -> bool:
    """Not beside other changes, and one at a time."""
    busy = spare or state.roster.starts or _swapping(state, view)
    return need.settled and not busy and not is_short(view, need)


def _swapping(state: State, view: View) -> tuple[str, ...]:
    """Machines that others were activated to replace, and are still there; given up after a while."""
    if view.seen.now_s - state.swapped_s >= _SWAP_PATIENCE_S:
        return ()
    return tuple(name for name in state.swapped if name in view.active)


def _cover(
    state: State, view: View, missing_per_s: float, why: str, rules: Rules
) -> tuple[State, tuple[Decision, ...]]:
    """Cheapest first, or as the policy says."""
    picks = choose(view.open.offers, missing_per_s, rules, state.roster.ordered)
    return _activate(state, view, picks, why, rules)


def _activate(state: State, view: View, picks: Picks, why: str, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    roster, decisions = place(view, state.roster, picks, why, rules)
    if not decisions:
        return state, (Keep(f"{why}; nothing is activated: {why_nothing(view, picks, rules)}"),)
    return msgspec.structs.replace(state, roster=roster, periods=Periods(), acted_s=view.seen.now_s), decisions


def _swap(state: State, view: View, dear: Replacement, told: str, rules: Rules) -> tuple[State, tuple[Decision, ...]]:
    """Activate first; what it is for is released once it can be done without."""
    after, decisions = _activate(state, view, dear.picks, f"{dear.reason}; {told}", rules)
    if after is state:
        return state, decisions
    return msgspec.structs.replace(after, swapped=dear.machine_ids, swapped_s=view.seen.now_s), decisions


def _release(state: State, view: View, names: list[str], why: str) -> tuple[State, tuple[Decision, ...]]:
    decisions = []
    for name in names:
        machine = view.active[name]
        rho = excess.unit_cost(machine, view)
        brought = f"{machine.usd_per_h:.4g} USD/h for {machine.rate.mean_per_s:.3g} trajectories/s"
        decisions.append(
            Release(name, machine.offer, f"{why}; releases {name} ({brought}, {rho:.3g} USD/h per trajectory/s)")
        )
    acted = msgspec.structs.replace(
        state, roster=state.roster.dismiss(*names), periods=Periods(), acted_s=view.seen.now_s
    )
    return acted, tuple(decisions)


def _kept(periods: Periods, *, cooled: bool, covered: bool, told: str) -> str:
    lasting = ", ".join(
        f"{what} for {count} decision periods"
        for what, count in (("short", periods.short), ("more than enough", periods.spare), ("dear", periods.dear))
        if count
    )
    waiting = "" if cooled or not lasting else ", waiting for the cool-down"
    return f"{lasting or ('enough' if covered else 'within the noise of the target')}{waiting}; {told}"


def _counted(periods: int, most: int, deviates: bool) -> int:
    return min(most, periods + 1) if deviates else max(0, periods - 1)

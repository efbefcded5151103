"""A market, its machines and their deliveries in virtual time, run by the controller: numbers only.

Groups of ``ROWS`` trajectories come with gaps drawn per machine, so that what one machine does depends on no other.
"""

from __future__ import annotations

from random import Random

import msgspec

from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.controller import State, decide
from echo2.provisioning.decisions import Activate, Decision, End, Keep, Release
from echo2.provisioning.ledger import Ledger
from echo2.provisioning.observation import Listing, Machine, Observation, Phase, Price, listed
from echo2.provisioning.offers import Offer
from echo2.provisioning.rates import DeliveryRate, Estimate
from echo2.provisioning.rules import Rules

ROWS = 8


def offer(name: str, usd_per_h: float, rollouts_per_s: float, count: int = 20, **more: float) -> Offer:
    return Offer(name=name, gpu="G", count=count, usd_per_h=usd_per_h, rollouts_per_s=rollouts_per_s, **more)


def rules(**changes: object) -> Rules:
    """R = 100 and T_train = 100 s ask for 1 trajectory/s, and gamma = 1.1 for 1.1."""
    kept = {"rollouts_per_step": 100, "staleness_budget": 4, "publish_period": 2, "rule": "overlapped", **changes}
    return msgspec.convert(kept, Rules)


class Seller:
    """Sells machines of one offer."""

    def __init__(
        self, offer: Offer, *, delivers: float | None = None, boot_s: float = 60.0, fails: int = 0,
    ) -> None:  # fmt: skip
        """delivers: what its machines really do, of what it states.  fails: so many of its first orders fail."""
        self.offer = offer
        self.true_per_s = offer.rollouts_per_s if delivers is None else delivers
        self.boot_s, self.fails = boot_s, fails
        self.usd_per_h: float | None = offer.usd_per_h


class SimMachine:
    def __init__(self, machine_id: str, seller: Seller, now_s: float, seed: int) -> None:
        self.machine_id, self.seller = machine_id, seller
        self.usd_per_h = seller.usd_per_h or 0.0
        self.phase = Phase.STARTING
        self.up_s = now_s + seller.boot_s
        self.paid_until_s = now_s + seller.offer.min_rental_h * SECONDS_PER_H
        self.true_per_s = seller.true_per_s
        self.heard = True
        lead_s = 0.5 * ROWS / self.true_per_s if self.true_per_s else 0.0
        self.rate = DeliveryRate(prior_per_s=seller.offer.rollouts_per_s, rows_per_delivery=ROWS, lead_s=lead_s)
        self.draw = Random(f"{seed}/{machine_id}")
        self.next_s = 0.0


class ClosedLoop:
    def __init__(
        self, rules: Rules, sellers: list[Seller], *, t_train_s: float | None = 100.0, t_bcast_s: float | None = 20.0,
        regularity: float = 4.0, exact: bool = False, learner_usd_per_h: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        """regularity: gaps are gamma variables of this shape, 1 for deliveries at random.  exact: rates are known."""
        self.rules, self.sellers, self.seed = rules, {s.offer.name: s for s in sellers}, seed
        self.t_train_s, self.t_bcast_s = t_train_s, t_bcast_s
        self.regularity, self.exact = regularity, exact
        self.learner_usd_per_h = learner_usd_per_h
        self.now_s = 0.0
        self.state = State()
        self.machines: dict[str, SimMachine] = {}
        self.ledger = Ledger().rent("learner", learner_usd_per_h, 0.0)
        self.decided: list[tuple[float, Decision]] = []
        self.ended_s: float | None = None
        self.released_below: list[str] = []
        """Releases after which less than the target was really delivered."""

    # ---- what happens ---------------------------------------------------------------------------------------------

    def run(self, periods: int) -> None:
        for _ in range(periods):
            self.now_s += self.rules.period_s
            self._live()
            self.look()

    def look(self) -> tuple[Decision, ...]:
        self.state, decisions = decide(self.state, self.seen(), self.rules)
        for decision in decisions:
            self.decided.append((self.now_s, decision))
            self._carry_out(decision)
        return decisions

    def kill(self, machine_id: str) -> None:
        self.machines[machine_id].phase = Phase.LOST
        self.ledger = self.ledger.lose(machine_id, self.now_s)

    def slow(self, machine_id: str, share: float) -> None:
        machine = self.machines[machine_id]
        machine.true_per_s *= share
        machine.next_s = self._next(machine)

    # ---- what is seen ---------------------------------------------------------------------------------------------

    def seen(self) -> Observation:
        return Observation(
            now_s=self.now_s,
            t_train_s=self.t_train_s,
            t_bcast_s=self.t_bcast_s,
            machines=tuple(self._machine(machine) for machine in self.machines.values()),
            listings=tuple(self._listing(seller) for seller in self.sellers.values()),
            spent_usd=self.ledger.total_usd(self.now_s),
            learner_usd_per_h=self.learner_usd_per_h,
        )

    def of(self, *phases: Phase) -> list[SimMachine]:
        return [machine for machine in self.machines.values() if machine.phase in phases]

    def count(self, name: str) -> int:
        """Machines of an offer that work or start."""
        return sum(machine.seller.offer.name == name for machine in self.of(Phase.ACTIVE, Phase.STARTING))

    @property
    def true_per_s(self) -> float:
        return sum(machine.true_per_s for machine in self.of(Phase.ACTIVE) if machine.heard)

    def actions(self, since_s: float = -1.0) -> list[Decision]:
        return [decision for at_s, decision in self.decided if at_s > since_s and not isinstance(decision, Keep)]

    # ---- inside ---------------------------------------------------------------------------------------------------

    def _live(self) -> None:
        for machine in self.machines.values():
            if machine.phase is Phase.STARTING and machine.up_s <= self.now_s:
                machine.phase = Phase.ACTIVE
                machine.rate = machine.rate.given_work(machine.up_s)
                machine.next_s = machine.up_s + self._gap(machine)
            elif machine.phase is Phase.DRAINING:
                machine.phase = Phase.LOST
                self.ledger = self.ledger.release(machine.machine_id, self.now_s)
            while machine.phase is Phase.ACTIVE and machine.heard and machine.next_s <= self.now_s:
                machine.rate = machine.rate.delivered(machine.next_s, ROWS)
                machine.next_s += self._gap(machine)
        if self.ended_s is not None and self.now_s >= self.ended_s + self.rules.end_s:
            for name in list(self.ledger.rentals):
                self.ledger = self.ledger.release(name, self.ended_s + self.rules.end_s)
            for machine in self.machines.values():
                machine.phase = Phase.LOST

    def _next(self, machine: SimMachine) -> float:
        return self.now_s + self._gap(machine)

    def _gap(self, machine: SimMachine) -> float:
        if machine.true_per_s <= 0:
            return 1e12
        mean_s = ROWS / machine.true_per_s
        return machine.draw.gammavariate(self.regularity, mean_s / self.regularity)

    def _machine(self, machine: SimMachine) -> Machine:
        active = machine.phase is Phase.ACTIVE
        rate = Estimate()
        if active:
            rate = Estimate(machine.true_per_s) if self.exact else machine.rate.estimate(self.now_s)
        return Machine(
            machine_id=machine.machine_id,
            offer=machine.seller.offer.name,
            phase=machine.phase,
            usd_per_h=machine.usd_per_h,
            rate=rate,
            available=machine.heard,
            delivered=bool(machine.rate.deliveries) or (self.exact and active),
            paid_until_s=machine.paid_until_s,
        )

    def _listing(self, seller: Seller) -> Listing:
        listing = listed(seller.offer, self.now_s)
        return msgspec.structs.replace(listing, prices=(Price(seller.usd_per_h, self.now_s),))

    def _carry_out(self, decision: Decision) -> None:
        if isinstance(decision, Activate):
            seller = self.sellers[decision.offer]
            for name in decision.machine_ids:
                assert name not in self.machines, "an id is given once"
                machine = SimMachine(name, seller, self.now_s, self.seed)
                self.machines[name] = machine
                if seller.fails > 0:
                    seller.fails -= 1
                    machine.phase = Phase.FAILED
                else:
                    rental_s = seller.offer.min_rental_h * SECONDS_PER_H
                    self.ledger = self.ledger.rent(name, machine.usd_per_h, self.now_s, rental_s)
        elif isinstance(decision, Release):
            machine = self.machines[decision.machine_id]
            worked = machine.phase is Phase.ACTIVE and machine.heard
            machine.phase = Phase.DRAINING
            target = self.rules.gamma * self.rules.rollouts_per_step / (self.t_train_s or 1.0)
            if worked and self.true_per_s < target * (1 - 1e-9):
                self.released_below.append(decision.machine_id)
        elif isinstance(decision, End):
            self.ended_s = self.now_s

"""The controller's own book of machines: ordered, working, told to go, and which offers failed.

Invariant: a machine is in one place of the book from the order for it until it is gone (field report I02): ordered ones
count until their worker joins or their deadline passes, whether or not anybody reports them yet. Whatever leaves that
was not told to go is noticed once (I05).

Immutable; time enters as a number.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from echo2.provisioning.observation import Machine, Observation, Phase
from echo2.provisioning.rules import Rules

_MOST_DOUBLINGS = 6
"""An offer that keeps failing is tried again after 64 back-off times at the latest."""


class Start(msgspec.Struct, frozen=True):
    """A machine that was ordered and has not joined."""

    offer: str
    expected_per_s: float
    """Trajectories per second, less the time in which it will be down."""
    usd_per_h: float
    start_by_s: float
    paid_until_s: float


class Worked(msgspec.Struct, frozen=True):
    """A machine whose worker joined."""

    offer: str
    delivered: bool


class Misses(msgspec.Struct, frozen=True):
    """Machines of an offer that came to nothing, one after another."""

    count: int
    retry_s: float
    """The offer is left alone until then."""


class Happened(msgspec.Struct, frozen=True):
    """What became of machines since the last look."""

    lost: tuple[str, ...] = ()
    """Were counted and are not any more: taken away, given notice, or silent."""
    failed: tuple[str, ...] = ()
    """Were ordered and never came up."""
    overdue: tuple[str, ...] = ()
    """Of those, the ones that must be given back: their deadline passed."""


class Roster(msgspec.Struct, frozen=True):
    ordered: int = 0
    """Number of the newest order."""
    starts: dict[str, Start] = {}
    working: dict[str, Worked] = {}
    """Active and heard, by id."""
    dismissed: frozenset[str] = frozenset()
    """Told to go. Never forgotten: a late report of one is no new machine."""
    silent_since_s: dict[str, float] = {}
    """Active machines that are not heard (a_i = 0)."""
    misses: dict[str, Misses] = {}
    """By offer; gone when one of its machines delivers for the first time. That an older one goes on delivering says
    nothing of new ones: it would let a crash at the start be repeated at every look."""

    def update(self, seen: Observation, expected_per_s: Mapping[str, float], rules: Rules) -> tuple[Roster, Happened]:
        """The book as of ``seen``, whose machines are ``merged``."""
        page = _Page(self, seen, expected_per_s, rules)
        page.follow_starts()
        page.follow_working()
        page.take_in()
        return page.closed(), Happened(tuple(page.lost), tuple(page.failed), tuple(page.overdue))

    def order(self, starts: Mapping[str, Start], last: int) -> Roster:
        """``last``: the highest number that was given."""
        return msgspec.structs.replace(self, ordered=last, starts={**self.starts, **starts})

    def dismiss(self, *machine_ids: str) -> Roster:
        gone = frozenset(machine_ids)
        return msgspec.structs.replace(
            self,
            dismissed=self.dismissed | gone,
            starts={name: start for name, start in self.starts.items() if name not in gone},
            working={name: worked for name, worked in self.working.items() if name not in gone},
            silent_since_s={name: since for name, since in self.silent_since_s.items() if name not in gone},
        )

    def moved(self, shift_s: float) -> Roster:
        """The same on a clock that shows ``shift_s`` more."""
        starts = {
            name: msgspec.structs.replace(
                start, start_by_s=start.start_by_s + shift_s, paid_until_s=start.paid_until_s + shift_s
            )
            for name, start in self.starts.items()
        }
        silent = {name: since_s + shift_s for name, since_s in self.silent_since_s.items()}
        misses = {name: Misses(miss.count, miss.retry_s + shift_s) for name, miss in self.misses.items()}
        return msgspec.structs.replace(self, starts=starts, silent_since_s=silent, misses=misses)

    def retry_s(self, offer: str) -> float | None:
        """When an offer that failed may be tried again; None for one that did not."""
        return self.misses[offer].retry_s if offer in self.misses else None


class _Page:
    """The next state of a roster, while it is written."""

    def __init__(self, before: Roster, seen: Observation, expected_per_s: Mapping[str, float], rules: Rules) -> None:
        self.before, self.seen, self.expected_per_s, self.rules = before, seen, expected_per_s, rules
        self.machines = {machine.machine_id: machine for machine in seen.machines}
        self.starts, self.working = dict(before.starts), dict(before.working)
        self.misses = dict(before.misses)
        self.silent: dict[str, float] = {}
        self.lost: list[str] = []
        self.failed: list[str] = []
        self.overdue: list[str] = []

    def follow_starts(self) -> None:
        for name, start in sorted(self.before.starts.items()):
            machine = self.machines.get(name)
            phase = Phase.STARTING if machine is None else machine.phase
            if phase is Phase.STARTING:
                if self.seen.now_s >= start.start_by_s:
                    self.overdue.append(name)
                    self._missed(name, start.offer, taken=False)
            elif phase is Phase.FAILED:
                self._missed(name, start.offer, taken=False)
            elif phase in (Phase.LOST, Phase.DRAINING):
                # Killed while it was set up: a preemption like any other, not the offer's failure (I05).
                self._missed(name, start.offer, taken=True)
            else:
                del self.starts[name]  # It joined; take_in counts it.

    def follow_working(self) -> None:
        for name, worked in sorted(self.before.working.items()):
            machine = self.machines.get(name)
            if machine is not None and machine.phase is Phase.ACTIVE and machine.available:
                continue
            del self.working[name]
            self.lost.append(name)
            dead = machine is None or machine.phase in (Phase.LOST, Phase.FAILED)
            if dead and worked.offer and not worked.delivered:
                self._miss(worked.offer, taken=True)

    def take_in(self) -> None:
        """Machines that are there now, whoever ordered them."""
        for name, machine in sorted(self.machines.items()):
            if name in self.before.dismissed:
                continue
            if machine.phase is Phase.ACTIVE and machine.available:
                if machine.delivered and not self._had_delivered(name):
                    self.misses.pop(machine.offer, None)
                self.working[name] = Worked(machine.offer, machine.delivered or self._had_delivered(name))
            elif machine.phase is Phase.ACTIVE:
                self.silent[name] = self.before.silent_since_s.get(name, self.seen.now_s)
            elif machine.phase is Phase.STARTING and machine.offer and not self._known_start(name):
                self.starts[name] = self._adopted(machine)

    def closed(self) -> Roster:
        return Roster(
            self.before.ordered,
            self.starts,
            self.working,
            self.before.dismissed | frozenset(self.overdue),
            self.silent,
            self.misses,
        )

    def _had_delivered(self, name: str) -> bool:
        return name in self.before.working and self.before.working[name].delivered

    def _known_start(self, name: str) -> bool:
        return name in self.before.starts or name in self.starts

    def _adopted(self, machine: Machine) -> Start:
        """Ordered by an earlier life of the controller."""
        latest_s = self.seen.now_s + self.rules.start_s
        start_by_s = latest_s if machine.start_by_s is None else machine.start_by_s
        expected = self.expected_per_s.get(machine.offer, 0.0)
        return Start(machine.offer, expected, machine.usd_per_h, start_by_s, machine.paid_until_s)

    def _missed(self, name: str, offer: str, *, taken: bool) -> None:
        del self.starts[name]
        self.failed.append(name)
        self._miss(offer, taken=taken)

    def _miss(self, offer: str, *, taken: bool) -> None:
        """``taken``: from outside. The first of those is forgiven, so that a preemption is replaced at once."""
        count = 1 + (self.misses[offer].count if offer in self.misses else 0)
        doublings = min(count - 1 - taken, _MOST_DOUBLINGS)
        wait_s = self.rules.back_off_s * 2.0**doublings if doublings >= 0 else 0.0
        self.misses[offer] = Misses(count, self.seen.now_s + wait_s)

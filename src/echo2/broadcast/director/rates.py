"""How fast nodes and the seed are, from what flowed between them.

Invariant: the best of the last three transfers that say something of a node counts, so one bad transfer moves nobody;
the seed's uplink is taken for known only when flows were held up by it. Rates are bytes per second. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from echo2.broadcast.director.rounds import Evidence, Link, Round
from echo2.broadcast.plan.model import SEED

REMEMBERED = 3
"""Transfers of which the best counts."""
OWN_RATE, MORE_THAN_OWN = 0.9, 1.1
"""A node that receives between these shares of its own rate is not held up by its sender."""
GROWTH = 1.5
"""How much better than seen something may be while nothing was held up by it."""
UNKNOWN_NODE = 12.5e6
UNKNOWN_UPLINK = 50e6
"""Before anything was measured: 100 and 400 Mbit/s."""


class Rates:
    def __init__(self) -> None:
        self._round = Round({}, relayed=False)
        self._receives: dict[str, deque[float]] = {}
        self._sends: dict[str, deque[float]] = {}
        self._heard: dict[Link, float] = {}
        self._from_seed: dict[str, float] = {}
        self._uplinks: deque[Round] = deque(maxlen=REMEMBERED)

    def begin(self, planned: Mapping[Link, float], relayed: bool, held: bool = False) -> None:
        """A transfer, whose senders pass on what they get (``relayed``), or new links that are warmed.  held: nobody
        may send faster than planned, so what is seen is not what anybody can do at most."""
        receives, sends = self._round.evidence()
        seed_held_up = _held_up(self._shares(self._round))
        for node_id, evidence in receives.items():
            _learn(self._receives, node_id, evidence, evidence.tells or (evidence.below_plan and not seed_held_up))
            if evidence.fell_short and self._round.relayed:
                self._from_seed.pop(node_id, None)
        for node_id, evidence in sends.items():
            _learn(self._sends, node_id, evidence, evidence.tells)
        self._remember_uplink(seed_held_up)
        self._round = Round(dict(planned), relayed, held, (_usual(self._sends, {}), _usual(self._receives, {})))

    def saw(self, parent: str, child: str, bytes_per_s: float) -> None:
        """What ``child`` says that it got from ``parent``. A repeated number is no new measurement."""
        if self._heard.get((parent, child)) == bytes_per_s or not self._round.expects(parent, child):
            return
        self._heard[parent, child] = bytes_per_s
        self._round.saw(parent, child, bytes_per_s)
        if parent == SEED:
            self._from_seed[child] = bytes_per_s

    def egress(self, bytes_per_s: float) -> None:
        """All that the seed sends."""
        self._round.egress = max(self._round.egress, bytes_per_s)

    def knows(self, parent: str, child: str) -> bool:
        """Whether both were seen at work; what the seed itself can do is another question."""
        return (child in self._receives or child in self._from_seed) and (parent == SEED or parent in self._sends)

    # ---- nodes -------------------------------------------------------------------------------------------------

    def of(self, names: Iterable[str]) -> dict[str, tuple[float, float]]:
        """(up, down) of each: as measured, else what is usual. Who gets more from the seed than from peers may be able
        to receive still more; the next transfer tells."""
        receives, sends = self._round.evidence()
        usual_up = _usual(self._sends, sends) or UNKNOWN_NODE
        usual_down = self._usual_down()
        rates = {}
        for name in names:
            down, from_seed = _known(self._receives, receives, name) or usual_down, self._from_seed.get(name, 0.0)
            may = GROWTH * from_seed if from_seed > MORE_THAN_OWN * down else down
            rates[name] = _known(self._sends, sends, name) or usual_up, may
        return rates

    # ---- the seed ----------------------------------------------------------------------------------------------

    def uplink(self) -> float:
        """B_0. While every child of the seed ran at its own rate, the uplink was not the limit: it may suffice for half
        as many children again, or for one more."""
        best = self._best_egress()
        if not best:
            return UNKNOWN_UPLINK
        return max(GROWTH * best, best + self._usual_down()) if self._was_idle() else best

    def explores(self, egress_bytes_per_s: float) -> bool:
        """Whether so much from the uplink is more than was ever seen, and it may have it."""
        return egress_bytes_per_s > MORE_THAN_OWN * self._best_egress() and self._was_idle()

    def _best_egress(self) -> float:
        return max((x.egress for x in self._telling()), default=0.0)

    def _was_idle(self) -> bool:
        """While it sent the most, its children ran at their own rates."""
        rounds, best = self._telling(), self._best_egress()
        shares = [share for x in rounds if x.egress >= OWN_RATE * best and (share := self._shares(x))]
        held_up = any(map(_held_up, shares))
        idle = any(min(share) >= OWN_RATE and median(share) <= MORE_THAN_OWN for share in shares)
        return idle and not held_up

    def _telling(self) -> list[Round]:
        """Rounds that say something of the uplink."""
        now = [] if self._round.held and self._uplinks else [self._round]
        return [x for x in (*self._uplinks, *now) if x.egress > 0]

    def _shares(self, seen: Round) -> list[float]:
        """Of the rate that it has elsewhere, what each child of the seed got. What is learnt later judges earlier
        rounds."""
        receives, _ = self._round.evidence()
        usual = self._usual_down()
        return [rate / (_known(self._receives, receives, child) or usual) for child, rate in seen.from_seed.items()]

    def _usual_down(self) -> float:
        return _usual(self._receives, self._round.evidence()[0]) or UNKNOWN_NODE

    def _remember_uplink(self, held_up: bool) -> None:
        """A round that the uplink did not hold up says nothing new once one was that sent as much."""
        enough = OWN_RATE * self._round.egress
        known = any(x.egress >= enough and _held_up(self._shares(x)) for x in self._uplinks)
        if self._round.egress > 0 and not self._round.held and (held_up or not known):
            self._uplinks.append(self._round)


def _held_up(shares: Sequence[float]) -> bool:
    """By the seed: its typical child got less than it can receive."""
    return bool(shares) and median(shares) < OWN_RATE


def _learn(table: dict[str, deque[float]], node_id: str, evidence: Evidence, tells: bool) -> None:
    before = table.get(node_id)
    better = evidence.rate > max(before) if before else tells
    if better or evidence.fell_short:
        table.setdefault(node_id, deque(maxlen=REMEMBERED)).append(evidence.rate)


def _known(table: Mapping[str, deque[float]], now: Mapping[str, Evidence], node_id: str) -> float:
    """0 for unknown."""
    before, evidence = table.get(node_id), now.get(node_id)
    if evidence is None or not (before or evidence.tells):
        return max(before) if before else 0.0
    return max(*before, evidence.rate) if before else evidence.rate


def _usual(table: Mapping[str, deque[float]], now: Mapping[str, Evidence]) -> float:
    """Median of what is known; 0 where nothing is."""
    rates = [rate for node_id in {*table, *now} if (rate := _known(table, now, node_id))]
    return median(rates) if rates else 0.0

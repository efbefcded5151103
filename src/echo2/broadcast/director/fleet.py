"""The nodes that are connected to the seed, as far as plans care.

Invariant: what a plan is made from changes only when something measured changed materially, so plans and their warm
links stay. Who sent others wrong or too few chunks feeds nobody for a while, nor does whom others cannot dial; who
blames many is not believed. Pure.
"""

from __future__ import annotations

from collections.abc import Collection

from echo2.broadcast.director.rates import UNKNOWN_UPLINK, Rates
from echo2.broadcast.plan.model import SEED, Node
from echo2.broadcast.relay.frames import Report, Source

MATERIAL = 1.25
"""A node's rate that changed by less than this factor changes no plan."""
MATERIAL_UPLINK = 1.1
PROBATION_S = 600.0
"""So long an accused node feeds nobody."""
BELIEVED = 2
"""Who accuses more peers than that is itself the one that is slow."""
MOST_ACCUSED = 1 / 3
"""When more of the fleet than that is accused, the plan was wrong, not the nodes."""
MISSED_AGAIN_S = 30.0
"""A node's word that it cannot dial a peer, or can again, makes new plans at most so often. An honest one takes it back
after a minute at the earliest."""
PROBE_AGAIN_S, MOST_PROBE_AGAIN_S = 30.0, 600.0
"""After a node could not be dialled back, it is tried again; the pause doubles from the first to the second."""


class Member:
    """A connected node."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.reachable: bool | None = None
        """None until it was dialled back, which counts as no."""
        self.probe_at_s = float("inf")
        """When it is dialled back again."""
        self.probe_pause_s = PROBE_AGAIN_S
        self.report = Report()
        self.heard = False
        """It has reported since it connected."""
        self.missed_s = float("-inf")
        """When plans were made anew last because of peers that it could not dial."""
        self.cut_off = False
        """It told of so many peers that it could not dial that it is itself the cause, from then on."""


class Fleet:
    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.rates = Rates()
        self._used: dict[str, tuple[float, float]] = {}
        self.uplink = UNKNOWN_UPLINK
        self._accused_at: dict[str, dict[str, float]] = {}
        """By accused and accuser."""
        self._missed_by: dict[str, set[str]] = {}
        """By node: peers that tried to dial it since it joined, and could not."""

    def join(self, source: Source) -> None:
        self.leave(source.node_id)  # of an earlier link whose end was not noticed
        self._missed_by.pop(source.node_id, None)
        self.members[source.node_id] = Member(source)

    def leave(self, node_id: str) -> None:
        member = self.members.pop(node_id, None)
        self._note_missed(node_id, member.report.unreachable if member is not None else (), ())

    def probed(self, source: Source, reachable: bool, now: float) -> bool:
        """Whether the node could be dialled back there; returns whether that is news. An answer about an earlier life
        of the node, which listened elsewhere, is none."""
        member = self.members.get(source.node_id)
        if member is None or member.source != source:
            return False
        before, member.reachable = member.reachable, reachable
        member.probe_at_s = float("inf") if reachable else now + member.probe_pause_s
        member.probe_pause_s = min(2 * member.probe_pause_s, MOST_PROBE_AGAIN_S)
        return before is not reachable

    def probes_due(self, now: float) -> list[Source]:
        """Nodes to be dialled back again; each is told once, until the answer is there."""
        due = [member for member in self.members.values() if now >= member.probe_at_s]
        for member in due:
            member.probe_at_s = float("inf")
        return [member.source for member in due]

    def report(self, node_id: str, report: Report, now: float) -> bool:
        """Returns whether plans shall be made anew: it could not dial a peer, or can again. Who says so all the time
        has to wait for the next plan."""
        member = self.members[node_id]
        is_news = member.report.unreachable != report.unreachable and now - member.missed_s >= MISSED_AGAIN_S
        member.missed_s = now if is_news else member.missed_s
        self._note_missed(node_id, member.report.unreachable, report.unreachable)
        member.cut_off |= len(report.unreachable) > BELIEVED
        for accused in self.members.keys() & report.accused:
            since = self._accused_at.setdefault(accused, {})
            is_new = node_id not in since or (member.heard and accused not in member.report.accused)
            since[node_id] = now if is_new else since[node_id]
        member.heard = True
        for parent, rate in report.edges.items():
            self.rates.saw(parent, node_id, rate)
        member.report = report
        return is_news

    def where(self) -> dict[str, Source]:
        """Where each node is dialled; every node knows for itself where the seed is."""
        return {SEED: Source(SEED, "", 0)} | {name: member.source for name, member in self.members.items()}

    def demote(self, node_id: str, now: float) -> None:
        """It was far slower than the others."""
        self._accused_at.setdefault(node_id, {})[SEED] = now

    def _note_missed(self, node_id: str, before: Collection[str], after: Collection[str]) -> None:
        for peer in self.members.keys() & set(after).difference(before):
            self._missed_by.setdefault(peer, set()).add(node_id)
        for peer in set(before).difference(after):
            self._missed_by.get(peer, set()).discard(node_id)

    def reachable(self, node_id: str) -> bool | None:
        """Whether the seed could dial it back and no peer that is to be believed failed to; None until it was tried."""
        missed = self._missed_by.get(node_id, ())
        fair = [name for name in missed if not self.members[name].cut_off]
        return False if fair else self.members[node_id].reachable

    def distrusted(self, now: float) -> set[str]:
        """Who shall feed nobody."""
        recent = {
            accused: {accuser for accuser, since in by.items() if now - since < PROBATION_S}
            for accused, by in self._accused_at.items()
            if accused in self.members
        }
        blames = [accuser for by in recent.values() for accuser in by]
        unfair = {accuser for accuser in blames if accuser != SEED and blames.count(accuser) > BELIEVED}
        guilty = {accused for accused, by in recent.items() if by - unfair}
        return unfair | (guilty if len(guilty) <= max(1, MOST_ACCUSED * len(self.members)) else set())

    # ---- what plans are made from ------------------------------------------------------------------------------

    def moved(self) -> bool:
        """Whether anything measured is materially different from what plans are made from."""
        if _apart(self.rates.uplink(), self.uplink) > MATERIAL_UPLINK:
            return True
        measured = self.rates.of(self.members)
        return any(
            name not in self._used or max(map(_apart, rates, self._used[name])) > MATERIAL
            for name, rates in measured.items()
        )

    def adopt(self) -> None:
        """Make plans from what is measured now."""
        self._used.update(self.rates.of(self.members))
        self.uplink = self.rates.uplink()

    def node(self, node_id: str, now: float) -> Node:
        return self.nodes([node_id], now)[0]

    def nodes(self, names: Collection[str], now: float) -> list[Node]:
        """As plans see them."""
        distrusted, fresh = self.distrusted(now), self.rates.of(name for name in names if name not in self._used)
        return [
            Node(
                name,
                *(self._used.get(name) or fresh[name]),
                self.reachable(name) is True and name not in distrusted,
            )
            for name in names
        ]


def _apart(a: float, b: float) -> float:
    return max(a, b) / min(a, b) if min(a, b) > 0 else float("inf")

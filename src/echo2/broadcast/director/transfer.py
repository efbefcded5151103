"""One object on its way to those that need it.

Invariant: a node that needs the object and is connected has a part in the plan, or waits a moment to get one. A node
that left is not planned for and finds its old place when it comes back. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import median

import msgspec

from echo2.broadcast.director.assignments import Assignments
from echo2.broadcast.plan.model import Plan, Stream
from echo2.broadcast.plan.repair import Kin, without
from echo2.broadcast.relay.frames import Report
from echo2.types import Policy

SLOW_SHARE = 0.5
SLOW_S = 3.0
"""Who gained less than this share of what the others gained meanwhile, for so long, while others wait for it, is passed
by."""
STANDSTILL_S = 20.0
"""A transfer in which nobody got anything for so long is not under way: who lacks it may have no room for it."""


class ObjectFacts(msgspec.Struct, frozen=True):
    """A published object, as far as sending it goes."""

    root: str
    manifest: bytes
    """Signed."""
    size_bytes: int
    chunk_bytes: int
    policy: Policy
    base_root: str
    """Decoded root that a node must hold to use it; empty for an anchor, which is sent to those that ask."""
    decoded_root: str = ""
    """What it becomes: who holds that needs it no more. Empty when that is not known."""


class Transfer:
    def __init__(self, facts: ObjectFacts) -> None:
        self.facts = facts
        self.chunks = -(-facts.size_bytes // facts.chunk_bytes)
        self.plan: Plan | None = None
        """Nodes that left since are still in it."""
        self.assignments = Assignments(facts.manifest)
        self.paces: Mapping[Stream, float] = {}
        """Of streams that are held."""
        self.stale = False
        """Somebody may have to be told its part."""
        self.waiting: dict[str, float] = {}
        """Nodes without a part, and since when."""
        self._done: set[str] = set()
        """Nodes that had the object whole, even if they do not keep it."""
        self._keeping: set[str] = set()
        """Those that said last that they have it still."""
        self._counts: dict[str, int] = {}
        self._moved_s = float("-inf")
        """When anybody last came nearer to having the object."""
        self._began: set[str] = set()
        """Nodes that told how far they are."""
        self._given_up: set[str] = set()
        """Nodes that told how far they are and want it no more: another way got them further."""
        self._before: dict[str, int] = {}
        """By planned node: chunks that the others had already when it began, and it had not."""
        self._slow_since: dict[str, float] = {}
        self._planned: tuple[Plan | None, frozenset[str]] = (None, frozenset())
        """The nodes of a plan, looked up for every report."""

    def report(self, node_id: str, report: Report, is_newest: bool, now: float) -> None:
        """is_newest: of the deltas; it is sent unasked to all that hold its base."""
        root = self.facts.root
        self._note_progress(node_id, report, now)
        asks = root in report.needs or root in report.progress
        if root in report.complete or (self.facts.decoded_root and self.facts.decoded_root in report.held):
            self._done.add(node_id)
        elif asks and node_id in self._done:
            self._done.discard(node_id)
            self.tell_again(node_id)
        if asks:
            self._given_up.discard(node_id)
        if root in report.progress:
            self._began.add(node_id)
        elif node_id in self._began and asks:  # it lost what it had, for want of room perhaps
            self.tell_again(node_id)
        elif node_id in self._began and node_id not in self._done:
            self._give_up(node_id)
        is_base_holder = is_newest and self.facts.base_root in report.held
        no_more = node_id in self._done or node_id in self._given_up
        if no_more or node_id in self.planned or not (asks or is_base_holder):
            self.waiting.pop(node_id, None)
        else:
            self.waiting.setdefault(node_id, now)

    def _note_progress(self, node_id: str, report: Report, now: float) -> None:
        root = self.facts.root
        whole = root in report.complete
        if whole and node_id not in self._keeping:
            self._keeping.add(node_id)
            self.stale |= node_id in self._done  # it is back, and may feed others again
        elif not whole:
            self._keeping.discard(node_id)
        count = self.chunks if whole else report.progress.get(root, 0)
        if count != self._counts.get(node_id, 0):
            self._counts[node_id], self._moved_s = count, now

    def _give_up(self, node_id: str) -> None:
        """It serves nobody any more: those behind it get its parent."""
        self._given_up.add(node_id)
        self._began.discard(node_id)
        if self.plan is not None and node_id in self.planned:
            self.plan, self.stale = without(self.plan, node_id), True
        self.assignments.forget(node_id)

    def tell_again(self, node_id: str) -> None:
        """It knows nothing of its part, and begins anew."""
        self._began.discard(node_id)
        self._keeping.discard(node_id)
        self._before.pop(node_id, None)
        self.assignments.forget(node_id)
        self.stale |= node_id in self.planned

    @property
    def planned(self) -> frozenset[str]:
        if self._planned[0] is not self.plan:
            streams = self.plan.streams if self.plan is not None else ()
            self._planned = self.plan, frozenset(stream.child for stream in streams)
        return self._planned[1]

    def present(self, connected: Collection[str]) -> Plan | None:
        """The plan as it is among those that are connected and still have a part in it: who had the object and let go
        of it feeds nobody, and shall not get it again."""
        plan = self.plan
        gone = self.planned.difference(connected) | (self.planned & (self._done - self._keeping))
        for node_id in sorted(gone):
            plan = without(plan, node_id) if plan is not None else None
        return plan

    def unfinished(self, connected: Collection[str]) -> frozenset[str]:
        return self.planned.intersection(connected) - self._done

    def is_under_way(self, connected: Collection[str], now: float) -> bool:
        """Whether somebody has still to get it, and somebody got some of it lately."""
        return now - self._moved_s < STANDSTILL_S and bool(self.unfinished(connected))

    def begin(self, plan: Plan, now: float) -> None:
        self.plan, self._moved_s = plan, now

    def slow(self, reports: Mapping[str, Report], now: float) -> list[str]:
        """Connected nodes that have held others up for long enough."""
        counts = {name: self._count(name, reports[name]) for name in self.planned.intersection(reports)}
        self._note_newcomers(counts)
        most = max(counts.values(), default=0)
        suspects = [name for name in sorted(counts) if counts[name] < SLOW_SHARE * (most - self._before[name])]
        plan = self.present(reports) if suspects else None
        behind = _behind(plan, counts, self._before, suspects, self.chunks) if plan is not None else []
        self._slow_since = {name: self._slow_since.get(name, now) for name in behind}
        return [name for name, since in self._slow_since.items() if now - since >= SLOW_S]

    def stood_still(self, seconds: float, now: float) -> None:
        """The seed did: what nodes told meanwhile was not read."""
        self._slow_since = {name: min(since + seconds, now) for name, since in self._slow_since.items()}

    def _note_newcomers(self, counts: Mapping[str, int]) -> None:
        known = [count for name, count in counts.items() if name in self._before]
        usual = int(median(known)) if known else 0
        for name in counts.keys() - self._before.keys():
            self._before[name] = max(usual - counts[name], 0)

    def _count(self, node_id: str, report: Report) -> int:
        return self.chunks if node_id in self._done else report.progress.get(self.facts.root, 0)


def _behind(
    plan: Plan, counts: Mapping[str, int], before: Mapping[str, int], suspects: Sequence[str], chunks: int
) -> list[str]:
    """Who gained far fewer chunks than those that do not depend on it, and whom others wait for. Where several in a row
    are behind, the first is to blame. Around a ring everybody depends on everybody."""
    kin, behind = Kin(plan), []
    for name in suspects:
        below = {name, *kin.descendants(name)}
        others = [count for other, count in counts.items() if other not in below]
        if others and counts[name] < SLOW_SHARE * (median(others) - before[name]):
            behind.append(name)
    awaited = {stream.parent for stream in plan.streams if counts.get(stream.child, chunks) < chunks}
    return [name for name in behind if name in awaited and not set(behind).intersection(kin.ancestors(name))]

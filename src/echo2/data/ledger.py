"""Groups and rows with their states and counts, kept consistent under every mutation.

Invariant (I3): ``counts`` is the number of rows in each state, ``live`` the number of live groups of each version; both
move only together with the rows and groups they count. Every mutation appends the ``Change`` that makes it durable.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

import msgspec

from echo2.data.groups import Change, Group, GroupPut, GroupState, Lease, Row, RowKey, RowPut, RowsMoved
from echo2.types import RowState, Verdict


class Ledger:
    """All groups that are live, taken, or recent enough to answer retries about."""

    def __init__(self) -> None:
        self.groups: dict[int, Group] = {}
        self.rows: dict[int, dict[tuple[int, int], Row]] = {}
        """By group, then (index, attempt)."""
        self.generated = 0
        """Rows ever judged; counted on its own, so that the sum over states is a check and not a definition."""
        self.counts: Counter[RowState] = Counter()
        self.refused_by: Counter[Verdict] = Counter()
        self.groups_dropped = 0
        self.expired_tokens = 0
        """Sampled tokens of all expired rows: whether it is the long replies that age out (D10)."""
        self.live: Counter[int] = Counter()
        """L's summands: closed groups and leased ones that are not overdue, by version."""
        self.closed_by_version: Counter[int] = Counter()
        """How many groups a batch may take, but for their age."""
        self._counted: dict[int, int] = {}
        self._overdue: set[int] = set()
        self._unleased: dict[int, None] = {}
        self._closed: dict[int, int] = {}
        """Version of each."""
        self._retired: deque[tuple[int, int]] = deque()
        self._orphaned: list[str] = []
        self._changes: list[Change] = []

    def drain_changes(self) -> list[Change]:
        changes, self._changes = self._changes, []
        return changes

    def drain_orphaned(self) -> list[str]:
        """Leases that ran when their groups were dropped, since the last call."""
        orphaned, self._orphaned = self._orphaned, []
        return orphaned

    def accepted(self, group: Group) -> list[Row]:
        return [r for r in self.rows[group.group_id].values() if r.verdict is Verdict.ACCEPTED]

    def missing(self, group: Group) -> tuple[int, ...]:
        taken = {row.index for row in self.accepted(group)}
        return tuple(index for index in range(group.size) if index not in taken)

    def lease_of(self, group_id: int, attempt: int) -> Lease | None:
        group = self.groups.get(group_id)
        if group is None or not 1 <= attempt <= group.attempt:
            return None
        return group.attempts[attempt - 1]

    def awaiting_lease(self) -> list[Group]:
        """Open groups whose last attempt failed or was lost, oldest first."""
        return sorted((self.groups[g] for g in self._unleased), key=lambda g: (version_of(g), g.group_id))

    def closed(self) -> list[Group]:
        """Groups that a batch may take, in no particular order."""
        return [self.groups[g] for g in self._closed]

    def restore(self, groups: Iterable[Group], rows: Iterable[Row], retired_at: int) -> None:
        """Take over what the store remembers; ``counts`` are set by the caller, as older rows are not loaded."""
        for group in groups:
            self.groups[group.group_id] = group
            self.rows[group.group_id] = {}
            if group.state.is_retired:
                self._retired.append((retired_at, group.group_id))
            self._recount(group)
        for row in rows:
            if row.group_id in self.rows:
                self.rows[row.group_id][(row.index, row.attempt)] = row

    def _add(self, row: Row, record: bytes | None) -> None:
        self.rows[row.group_id][(row.index, row.attempt)] = row
        self.generated += 1
        self.counts[row.state] += 1
        if row.state is RowState.REFUSED:
            self.refused_by[row.verdict] += 1
        self._changes.append(RowPut(row, record))

    def _move(self, keys: Iterable[RowKey], state: RowState, verdict: Verdict | None = None) -> None:
        moved = tuple(keys)
        for group_id, index, attempt in moved:
            row = self.rows[group_id][(index, attempt)]
            self.counts[row.state] -= 1
            self.counts[state] += 1
            if verdict is not None:
                self.refused_by[verdict] += 1
            row = msgspec.structs.replace(row, state=state, verdict=verdict or row.verdict)
            self.rows[group_id][(index, attempt)] = row
        if moved:
            self._changes.append(RowsMoved(moved, state, verdict))

    def _put(self, group: Group) -> None:
        self._recount(group)
        self._changes.append(GroupPut(msgspec.structs.replace(group, attempts=list(group.attempts))))

    def _retire(self, group: Group, state: GroupState, step: int) -> None:
        group.state, group.leased = state, False
        self._retired.append((step, group.group_id))
        self._put(group)

    def _forget(self, before_step: int) -> None:
        """Groups that ended before ``before_step``: retries about them are unattributed from now on."""
        while self._retired and self._retired[0][0] < before_step:
            _, group_id = self._retired.popleft()
            self.groups.pop(group_id, None)
            self.rows.pop(group_id, None)

    def _recount(self, group: Group) -> None:
        number = group.group_id
        is_open = group.state is GroupState.OPEN
        _mark(self._unleased, number, is_open and not group.leased)
        was_closed = self._closed.pop(number, None)
        if was_closed is not None:
            _count(self.closed_by_version, was_closed, -1)
        if group.state is GroupState.CLOSED:
            self._closed[number] = version_of(group)
            _count(self.closed_by_version, version_of(group), 1)
        if not group.leased:
            self._overdue.discard(number)
        old = self._counted.pop(number, None)
        if old is not None:
            _count(self.live, old, -1)
        if group.state is GroupState.CLOSED or (is_open and group.leased and number not in self._overdue):
            self._counted[number] = version_of(group)
            _count(self.live, version_of(group), 1)


def _count(counts: Counter[int], version: int, by: int) -> None:
    counts[version] += by
    if not counts[version]:
        del counts[version]


def _mark(members: dict[int, None], number: int, belongs: bool) -> None:
    if belongs:
        members[number] = None
    else:
        members.pop(number, None)


def version_of(group: Group) -> int:
    """Version that admission and the gate go by."""
    assert group.policy is not None, f"group {group.group_id} was never leased"
    return group.policy.version

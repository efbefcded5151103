"""From the rows that the learner audited to the workers that sent them.

Invariant: a row counts for the worker whose lease brought it, and once: a repeated report of a step changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from echo2.coordinator.books import Books
from echo2.metrics import Mismatch
from echo2.transport.messages import ReportStep, RowAudit


def note_audits(books: Books, report: ReportStep) -> None:
    """Of a step that is reported for the first time. What names no row of its batch is passed over."""
    if not report.audits:
        return
    attempts = {(group, index): attempt for group, index, attempt in books.buffer.batches[report.step].rows}
    found: dict[tuple[str, int], list[RowAudit]] = {}
    for audit in report.audits:
        attempt = attempts.pop((audit.group_id, audit.index), None)
        lease = None if attempt is None else books.buffer.lease_of(audit.group_id, attempt)
        if lease is not None:
            found.setdefault((lease.worker_id, audit.group_id), []).append(audit)
    for (worker_id, _), audits in found.items():
        books.audits.add(worker_id, audits)


def audited(books: Books) -> Mapping[str, Mismatch]:
    """What a metrics line tells of it, by worker id."""
    return books.audits.told({worker.worker_id: worker.name for worker in books.fleet.workers.values()})


def found_out(books: Books) -> Sequence[tuple[str, str]]:
    """Workers found out since the last call, and why."""
    return list(books.audits.take_convicted().items())

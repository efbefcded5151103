"""The live picture of a run, for people and for Prometheus. Pure: a rendering of the books at one moment."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from echo2.coordinator.books import Books
from echo2.coordinator.relays import UNKNOWN, RelayStanding
from echo2.metrics import StepMetrics
from echo2.report.prometheus import exposition as prometheus_text
from echo2.transport.messages import RunStatus
from echo2.types import RowState


def run_status(
    books: Books, last: StepMetrics | None, now: float, wait_reason: str, relays: Mapping[str, RelayStanding]
) -> RunStatus:
    """Everything ``echo2 status`` shows."""
    counts = {state.value: books.buffer.counts[state] for state in RowState}
    workers = tuple(
        {
            "id": worker.worker_id,
            "name": worker.name,
            "active": worker.active,
            "installed": None if worker.installed is None else str(worker.installed),
            "state": worker.state,
            "rate_per_s": worker.estimate(now).mean_per_s,
            "rows": worker.rows_delivered,
            **_costs(books, worker.machine_id or worker.worker_id, now),
            "last_seen_s": now - worker.last_seen_s,
            "leases": len(books.fleet.leases_of(worker.worker_id)),
            "spooled_groups": worker.spooled_groups,
            **msgspec.structs.asdict(relays.get(worker.worker_id, UNKNOWN)),
        }
        for worker in books.fleet.workers.values()
        if worker.worker_id not in books.outcasts
    )
    return RunStatus(
        run_id=books.state.run_id,
        name=books.config.run.name,
        phase=books.phase(),
        step=books.state.steps_reported,
        steps=books.config.run.steps,
        policy=books.state.current,
        last_metrics={} if last is None else msgspec.to_builtins(last),
        counts={"generated": books.buffer.generated, **counts},
        workers=workers,
        problem=books.stop_reason or wait_reason,
        set_aside=tuple(
            {"id": x.worker_id, "name": x.name, "reason": x.reason, "wall_time": x.wall_time}
            for x in books.outcasts.all()
        ),
        rescored={
            "checked": books.state.rescored,
            "differing": books.state.rescored_differing,
            "failed": books.state.rescoring_failed,
        },
    )


def _costs(books: Books, payee: str, now: float) -> dict[str, float]:
    """What is paid for a machine, or for a worker that joined by itself, an hour now and so far."""
    rental = books.bill.rentals.get(payee)
    ended_usd = books.bill.ended_usd.get(payee, 0.0)
    if rental is None:
        return {"usd_per_h": 0.0, "cost_usd": ended_usd}
    return {"usd_per_h": rental.usd_per_h, "cost_usd": ended_usd + rental.cost_usd(now)}


def exposition(status: RunStatus, last: StepMetrics | None, books: Books) -> bytes:
    """The text of ``/metrics``."""
    counters = {
        "unattributed": float(books.state.unattributed),
        "groups_dropped": float(books.buffer.groups_dropped),
        "prompts_drawn": float(books.state.cursor),
        "rescored_rewards": float(books.state.rescored),
        "rescored_rewards_differing": float(books.state.rescored_differing),
        "rescoring_failures": float(books.state.rescoring_failed),
    }
    return prometheus_text(status, last, counters)

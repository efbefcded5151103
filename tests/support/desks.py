"""A production coordinator on stores in memory, spoken to as a learner and as workers."""

from __future__ import annotations

from typing import Any

import msgspec
from building import trajectory

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.shelf import Published
from echo2.broadcast.signing import public_key
from echo2.config.load import build_config
from echo2.coordinator.lines import CollectedLines
from echo2.coordinator.program import Coordinator
from echo2.coordinator.rescoring import Scorer
from echo2.data.cursor import PromptCursor
from echo2.data.registry import load_tasks
from echo2.simulation.clock import CountedIds, VirtualClock
from echo2.simulation.memory import MemoryStore
from echo2.simulation.record import RecordedEvents
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.sources import NoRelays
from echo2.transport.messages import (
    Attach,
    Attached,
    Heartbeat,
    LeaseGrant,
    Principal,
    RequestLease,
    Role,
    RowSubmission,
    SubmitGroup,
    SubmitVerdicts,
)
from echo2.types import Policy, RowStatus, SnapshotKind, Verdict

KEY = bytes(range(32))
V0 = Policy(0, 0)
LEARNER = Principal(Role.LEARNER, "learner")
ONE, TWO = Principal(Role.WORKER, "one"), Principal(Role.WORKER, "two")


async def coordinator(
    store: MemoryStore | None = None,
    clock: VirtualClock | None = None,
    scorer: Scorer | None = None,
    **sections: dict[str, Any],
) -> Coordinator:
    """Batches of two groups of two. A later life when ``store`` has served an earlier one."""
    tables = {"rollout": {"engine": "scripted", "rollouts_per_step": 4, "group_size": 2}}
    config = build_config({**tables, **sections}, check_places=False)
    tasks = load_tasks(config.tasks)
    store = store or MemoryStore(0.0)
    return Coordinator(
        config, store, await store.load(), MemoryShelf(KEY), PromptCursor([(tasks["arithmetic"], 1.0)], 0),
        clock or VirtualClock(), CountedIds(), RecordedEvents(), CollectedLines(), NoRelays(), run_id="run",
        snapshot_public_key=public_key(KEY), scorer=scorer,
    )  # fmt: skip


async def attach(made: Coordinator, step: int = 0, digest: str = "") -> int:
    """The new learner's epoch; version 0 is published with the first one."""
    attached = await made.handle(LEARNER, Attach("run", step, digest, "initial", ()))
    assert isinstance(attached, Attached)
    if made.books.state.current is None:
        publish(made, V0)
    return attached.epoch


def publish(made: Coordinator, policy: Policy, raw_bytes: int = 100) -> None:
    """Let ``policy`` count as published, as an anchor."""
    entry = Entry(policy, SnapshotKind.ANCHOR, None, "0" * 64, raw_bytes, "1" * 64)
    made.hall.learner.published(Published(entry, raw_bytes), made.clock.monotonic())


async def leased(made: Coordinator, worker: Principal, installed: Policy = V0) -> LeaseGrant:
    held = tuple(lease.lease_id for lease in made.books.fleet.leases_of(worker.peer_id))
    await made.handle(worker, Heartbeat(installed, held))
    grant = await made.handle(worker, RequestLease(installed, 1.0))
    assert isinstance(grant, LeaseGrant), grant
    return grant


async def submitted(made: Coordinator, worker: Principal, grant: LeaseGrant, failed: int = 0) -> tuple[Verdict, ...]:
    """Verdicts of the whole group, of which the last ``failed`` rows failed."""
    record = msgspec.Raw(msgspec.msgpack.encode(trajectory(grant.prompt, grant.policy)))
    good = len(grant.indices) - failed
    rows = [
        RowSubmission(index, RowStatus.FINISHED if at < good else RowStatus.ERROR, record=record)
        for at, index in enumerate(grant.indices)
    ]
    reply = await made.handle(worker, SubmitGroup(grant.lease_id, grant.group_id, grant.attempt, tuple(rows)))
    assert isinstance(reply, SubmitVerdicts)
    return reply.verdicts


async def generate(made: Coordinator, groups: int, worker: Principal = ONE, installed: Policy = V0) -> None:
    for _ in range(groups):
        await submitted(made, worker, await leased(made, worker, installed))

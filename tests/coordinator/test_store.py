"""The SQLite store: durable, ordered, and equal to the memory it was written from (I3)."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest
from building import failed_row, prompt, row, rows, trajectory

from echo2.coordinator.history import RunState
from echo2.coordinator.operations import (
    EvalPut,
    MetricsDropped,
    MetricsPut,
    Outcast,
    OutcastPut,
    Peer,
    PeerPut,
    RunPut,
    Token,
    TokenPut,
)
from echo2.coordinator.store import SqliteStore
from echo2.data.buffer import REMEMBERED_STEPS, Buffer, BufferRules
from echo2.errors import DiskFull, UserError
from echo2.transport.messages import Role
from echo2.types import Policy, RowState, Verdict


@pytest.fixture
def store(tmp_path: Path):  # type: ignore[no-untyped-def]
    store = SqliteStore(tmp_path / "buffer.sqlite")
    yield store
    store.close()


def busy_buffer() -> Buffer:
    """One trained group, one in a batch, one closed, one waiting for another attempt, one dropped."""
    buffer = Buffer(BufferRules(2, 1, 2), lambda policy: None)
    for _ in range(3):
        group = buffer.open_group(prompt(), 2)
        buffer.grant(group, f"l{group.group_id}", "w1", Policy(0, 0))
        buffer.submit(group.group_id, 1, rows(group.prompt))
    buffer.form_batch()
    buffer.report_step(0)
    buffer.form_batch()
    half = buffer.open_group(prompt(1), 2)
    buffer.grant(half, "half", "w1", Policy(0, 0))
    buffer.submit(half.group_id, 1, [row(0, trajectory(half.prompt)), failed_row(1)])
    running = buffer.open_group(prompt(2), 2)
    buffer.grant(running, "running", "w2", Policy(0, 0))
    stale = buffer.open_group(prompt(3), 2)
    buffer.grant(stale, "stale", "w2", Policy(0, 0))
    buffer.submit(stale.group_id, 1, [row(0, b"\xc0"), failed_row(1)])
    return buffer


async def test_what_is_loaded_equals_the_memory_it_came_from(store: SqliteStore) -> None:
    buffer = busy_buffer()
    state = RunState(run_id="r", published=[Policy(0, 0)], steps_reported=1, next_batch=2)
    await store.commit([*buffer.drain_changes(), RunPut(state)])
    loaded = await store.load()
    assert loaded.state == state
    assert {g.group_id: g for g in loaded.groups} == buffer.groups
    assert {r.key: r for r in loaded.rows} == {r.key: r for group in buffer.rows.values() for r in group.values()}
    assert {b.step: b for b in loaded.batches} == buffer.batches
    assert loaded.counts == {state: n for state, n in buffer.counts.items() if n}
    assert loaded.refused_by == dict(buffer.refused_by)


async def test_a_restored_buffer_goes_on_where_the_old_one_stood(store: SqliteStore) -> None:
    buffer = busy_buffer()
    await store.commit(buffer.drain_changes())
    loaded = await store.load()
    again = Buffer(buffer.rules, buffer.lineage)
    again.next_batch, again.next_group = buffer.next_batch, buffer.next_group
    again.restore(loaded.groups, loaded.rows, buffer.next_batch)
    assert again.live == buffer.live
    assert [g.group_id for g in again.awaiting_lease()] == [g.group_id for g in buffer.awaiting_lease()]
    assert [g.group_id for g in again.ready_groups()] == [g.group_id for g in buffer.ready_groups()]


async def test_records_come_back_byte_for_byte_until_their_step_is_checkpointed(store: SqliteStore) -> None:
    buffer = busy_buffer()
    await store.commit(buffer.drain_changes())
    keys = buffer.batches[0].rows
    expected = [bytes(r.record) for r in rows(prompt())]
    assert await store.payloads(keys) == expected
    buffer.release_records(1)
    await store.commit(buffer.drain_changes())
    with pytest.raises(LookupError, match="not kept"):
        await store.payloads(keys)
    assert (await store.load()).counts[RowState.TRAINED] == 2, "the rows stay counted"
    assert await store.payloads(buffer.batches[1].rows) == expected


async def test_a_refusal_for_lack_of_signal_is_remembered_as_one(store: SqliteStore) -> None:
    buffer = Buffer(BufferRules(2, 1, 2, drop_zero_variance=True, max_zero_variance_drops=9), lambda policy: None)
    group = buffer.open_group(prompt(), 2)
    buffer.grant(group, "l", "w", Policy(0, 0))
    buffer.submit(group.group_id, 1, rows(group.prompt, 0, (1.0, 1.0)))
    await store.commit(buffer.drain_changes())
    loaded = await store.load()
    assert loaded.refused_by == {Verdict.NO_SIGNAL: 2}
    assert {r.verdict for r in loaded.rows} == {Verdict.NO_SIGNAL}


async def test_commits_that_arrive_together_keep_their_order(store: SqliteStore) -> None:
    lines = [[MetricsPut(0, str(number).encode())] for number in range(50)]
    await asyncio.gather(*(store.commit(line) for line in lines))
    assert (await store.load()).metrics == (b"49",)


async def test_lines_of_a_lost_history_are_dropped(store: SqliteStore) -> None:
    await store.commit([MetricsPut(step, b"old") for step in range(4)])
    await store.commit([MetricsDropped(2), MetricsPut(2, b"new"), EvalPut(3, b"eval")])
    loaded = await store.load()
    assert loaded.metrics == (b"old", b"old", b"new")
    assert loaded.evals == (b"eval",)


async def test_tokens_and_peers_survive(store: SqliteStore) -> None:
    token, peer = Token("d1", Role.WORKER, 9e9, 3), Peer("worker-1", "w", Role.WORKER, "d2")
    await store.commit([TokenPut(token), PeerPut(peer)])
    loaded = await store.load()
    assert (loaded.tokens, loaded.peers) == ((token,), (peer,))


async def test_workers_that_were_set_aside_survive(store: SqliteStore) -> None:
    outcast = Outcast("worker-1", "w", "it lied", 5.0)
    await store.commit([OutcastPut(outcast)])
    assert (await store.load()).outcasts == (outcast,)


async def test_after_a_failed_commit_nothing_is_accepted_on_top_of_the_gap(store: SqliteStore) -> None:
    with pytest.raises(KeyError):
        await store.commit(["not an operation"])  # type: ignore[list-item]
    with pytest.raises(KeyError):
        await store.commit([MetricsPut(0, b"line")])


async def test_a_full_disk_is_told_in_a_sentence_and_ends_all_commits(store: SqliteStore, tmp_path: Path) -> None:
    """Field report E07: the coordinator stops at once; what was committed before is whole."""
    await store.commit([MetricsPut(0, b"before")])
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count={pages}")
    for step in (1, 2):
        with pytest.raises(DiskFull, match="its disk is full; free space there"):
            await store.commit([MetricsPut(step, b"x" * 1_000_000)])
    store.close()
    again = SqliteStore(tmp_path / "buffer.sqlite")
    assert (await again.load()).metrics == (b"before",)
    again.close()


async def test_a_batch_that_may_be_replayed_is_loaded_whole_however_old(store: SqliteStore) -> None:
    """A publish period, or a checkpoint period, may be longer than verdicts are remembered."""
    steps = REMEMBERED_STEPS + 10
    buffer = Buffer(BufferRules(2, 1, 2), lambda policy: None)
    for step in range(steps):
        group = buffer.open_group(prompt(), 2)
        buffer.grant(group, f"l{step}", "w1", Policy(0, step))
        buffer.submit(group.group_id, 1, rows(group.prompt, step))
        assert buffer.form_batch() is not None
        buffer.report_step(step)
        await store.commit(buffer.drain_changes())
    loaded = await store.load()
    assert [batch.step for batch in loaded.batches] == list(range(steps))
    assert {key for batch in loaded.batches for key in batch.rows} <= {row.key for row in loaded.rows}


async def test_a_second_coordinator_on_the_same_store_is_refused(
    store: SqliteStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.coordinator.store.BUSY_TIMEOUT_S", 0.05)
    with pytest.raises(UserError, match="in use by another coordinator"):
        SqliteStore(tmp_path / "buffer.sqlite")


def test_a_file_that_is_no_store_is_named(tmp_path: Path) -> None:
    path = tmp_path / "buffer.sqlite"
    path.write_bytes(b"this is not a database, whatever its name says" * 50)
    with pytest.raises(UserError, match="must be a readable SQLite store"):
        SqliteStore(path)
    other = tmp_path / "other.sqlite"
    connection = sqlite3.connect(other)
    connection.execute("PRAGMA user_version=77")
    connection.close()
    with pytest.raises(UserError, match="store format 77"):
        SqliteStore(other)

"""The coordinator's durable memory: one SQLite file in WAL mode, written by one thread.

Invariant (I3): operations are applied in the order of ``commit`` calls; what one call brings is in one transaction; a
call returns only after the transaction that holds it is synced. Calls that arrive while the disk is busy share the next
transaction (group commit), so a slow disk costs latency, not throughput.
"""

from __future__ import annotations

import asyncio
import queue
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2.coordinator.history import RunState
from echo2.coordinator.operations import (
    AssetsPut,
    EvalPut,
    Loaded,
    MetricsDropped,
    MetricsPut,
    Operation,
    Outcast,
    OutcastPut,
    Peer,
    PeerPut,
    RunPut,
    Token,
    TokenPut,
)
from echo2.data.buffer import REMEMBERED_STEPS
from echo2.data.groups import (
    Batch,
    BatchesDropped,
    BatchPut,
    Group,
    GroupPut,
    RecordsDropped,
    Row,
    RowKey,
    RowPut,
    RowsMoved,
)
from echo2.errors import DiskFull, UserError
from echo2.transport.messages import AssetFile
from echo2.types import RowState, Verdict

FORMAT = 1
"""Of the file; another one is refused rather than guessed at."""
BUSY_TIMEOUT_S = 10.0
T = TypeVar("T")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS groups (
    group_id INTEGER PRIMARY KEY, state TEXT NOT NULL, ended_at INTEGER, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS rows (
    group_id INTEGER NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL,
    state TEXT NOT NULL, verdict TEXT NOT NULL, value BLOB NOT NULL, record BLOB,
    PRIMARY KEY (group_id, idx, attempt));
CREATE INDEX IF NOT EXISTS rows_by_state ON rows (state, verdict);
CREATE TABLE IF NOT EXISTS batches (step INTEGER PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS metrics (step INTEGER PRIMARY KEY, line BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS evals (step INTEGER PRIMARY KEY, line BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS tokens (digest TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS peers (digest TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS outcasts (worker_id TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
"""

_pack = msgspec.msgpack.encode


class _Job(msgspec.Struct, frozen=True):
    work: Callable[[sqlite3.Connection], Any]
    future: asyncio.Future[Any]
    writes: bool


class SqliteStore:
    """Opens ``path``; ``close`` waits for what was committed before. Raises UserError when it cannot be used."""

    def __init__(self, path: Path) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._path = path
        self._failed: Exception | None = None
        self._connection = _open(path)
        self._thread = threading.Thread(target=self._serve, name="store", daemon=True)
        self._thread.start()

    async def commit(self, operations: Sequence[Operation]) -> None:
        """Return once ``operations``, and all committed before, are durable. Raises DiskFull or what SQLite raised."""
        batch = tuple(operations)
        await self._do(lambda connection: _apply(connection, batch), writes=True)

    async def load(self) -> Loaded:
        return await self._do(_load, writes=False)

    async def payloads(self, row_keys: Sequence[RowKey]) -> list[bytes]:
        """Records of rows, in order. Raises LookupError for a record that is not kept any more."""
        keys = tuple(row_keys)
        return await self._do(lambda connection: [_record(connection, key) for key in keys], writes=False)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._connection.close()

    async def _do(self, work: Callable[[sqlite3.Connection], T], *, writes: bool) -> T:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._jobs.put(_Job(work, future, writes))
        result: T = await future
        return result

    def _serve(self) -> None:
        while True:
            jobs = [self._jobs.get()]
            while not self._jobs.empty():
                jobs.append(self._jobs.get())
            self._transact([job for job in jobs if job is not None])
            if None in jobs:
                return

    def _transact(self, jobs: list[_Job]) -> None:
        """One transaction for all; answers go out after it is synced."""
        answers: list[tuple[_Job, Any, Exception | None]] = []
        try:
            if self._failed is not None:
                raise self._failed
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                for job in jobs:
                    answers.append((job, *self._attempt(job)))
        except Exception as cause:  # Handed to everybody whose work was in the transaction.
            error = _told(cause, self._path)
            # A lost commit leaves memory ahead of disk: later ones must not land on top of the gap.
            self._failed = error
            answers = [(job, None, error) for job in jobs]
        for job, value, problem in answers:
            job.future.get_loop().call_soon_threadsafe(_settle, job.future, value, problem)

    def _attempt(self, job: _Job) -> tuple[Any, Exception | None]:
        try:
            return job.work(self._connection), None
        except LookupError as error:
            if job.writes:
                raise
            return None, error  # A question with no answer spoils nobody else's commit.


def _apply(connection: sqlite3.Connection, operations: Sequence[Operation]) -> None:
    for operation in operations:
        _APPLY[type(operation)](connection, operation)


def _open(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=FULL")
        # A second coordinator on the same run folder would corrupt the history: the first one keeps the file.
        connection.execute("PRAGMA locking_mode=EXCLUSIVE")
        (found,) = connection.execute("PRAGMA user_version").fetchone()
        if found not in (0, FORMAT):
            raise UserError(
                f"{path} has store format {found}, this version reads {FORMAT}: use the version that made it"
            )
        connection.execute(f"PRAGMA user_version={FORMAT}")
        connection.executescript(_SCHEMA)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        connection.close()
        if isinstance(told := _told(error, path), DiskFull):
            raise told from error
        if "locked" in str(error):
            raise UserError(f"{path} is in use by another coordinator: end that one first") from error
        raise UserError(f"{path} must be a readable SQLite store, got: {error}") from error
    return connection


def _told(error: Exception, path: Path) -> Exception:
    """A full disk in the words in which every program tells it; other errors as they are."""
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL:
        return DiskFull(f"{path} could not be written: its disk is full; free space there, then resume the run")
    return error


def _settle(future: asyncio.Future[Any], value: Any, problem: BaseException | None) -> None:
    if future.done():
        return
    if problem is None:
        future.set_result(value)
    else:
        future.set_exception(problem)


def _fact(connection: sqlite3.Connection, name: str, value: bytes) -> None:
    connection.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _put_row(connection: sqlite3.Connection, put: RowPut) -> None:
    row = put.row
    values = (row.group_id, row.index, row.attempt, row.state.value, row.verdict.value, _pack(row), put.record)
    connection.execute("INSERT OR REPLACE INTO rows VALUES (?, ?, ?, ?, ?, ?, ?)", values)


def _move_rows(connection: sqlite3.Connection, moved: RowsMoved) -> None:
    verdict = moved.verdict.value if moved.verdict else None
    keep_record = moved.state in (RowState.BUFFERED, RowState.TRAINED)
    connection.executemany(
        "UPDATE rows SET state = ?, verdict = coalesce(?, verdict), record = CASE WHEN ? THEN record END "
        "WHERE group_id = ? AND idx = ? AND attempt = ?",
        [(moved.state.value, verdict, keep_record, *key) for key in moved.keys],
    )


def _put_group(connection: sqlite3.Connection, put: GroupPut) -> None:
    group = put.group
    ended_at = "(SELECT coalesce(max(step) + 1, 0) FROM batches)" if group.state.is_retired else "NULL"
    connection.execute(
        f"INSERT OR REPLACE INTO groups VALUES (?, ?, {ended_at}, ?)",
        (group.group_id, group.state.value, _pack(group)),
    )


def _put_batch(connection: sqlite3.Connection, put: BatchPut) -> None:
    connection.execute("INSERT OR REPLACE INTO batches VALUES (?, ?)", (put.batch.step, _pack(put.batch)))


def _drop_batches(connection: sqlite3.Connection, dropped: BatchesDropped) -> None:
    connection.execute("DELETE FROM batches WHERE step >= ?", (dropped.first_step,))


def _drop_records(connection: sqlite3.Connection, dropped: RecordsDropped) -> None:
    """Records and batches of trained steps go; the rows' verdicts stay for counts and audits."""
    found = connection.execute("SELECT value FROM batches WHERE step < ?", (dropped.before_step,)).fetchall()
    for (value,) in found:
        keys = msgspec.msgpack.decode(value, type=Batch).rows
        connection.executemany(
            "UPDATE rows SET record = NULL WHERE group_id = ? AND idx = ? AND attempt = ?", list(keys)
        )
    connection.execute("DELETE FROM batches WHERE step < ?", (dropped.before_step - 1,))


def _put_metrics(connection: sqlite3.Connection, put: MetricsPut) -> None:
    connection.execute("INSERT OR REPLACE INTO metrics VALUES (?, ?)", (put.step, put.line))


def _put_eval(connection: sqlite3.Connection, put: EvalPut) -> None:
    connection.execute("INSERT OR REPLACE INTO evals VALUES (?, ?)", (put.step, put.line))


def _drop_metrics(connection: sqlite3.Connection, dropped: MetricsDropped) -> None:
    connection.execute("DELETE FROM metrics WHERE step >= ?", (dropped.first_step,))


def _put_token(connection: sqlite3.Connection, put: TokenPut) -> None:
    connection.execute("INSERT OR REPLACE INTO tokens VALUES (?, ?)", (put.token.digest, _pack(put.token)))


def _put_peer(connection: sqlite3.Connection, put: PeerPut) -> None:
    connection.execute("INSERT OR REPLACE INTO peers VALUES (?, ?)", (put.peer.digest, _pack(put.peer)))


def _put_outcast(connection: sqlite3.Connection, put: OutcastPut) -> None:
    connection.execute("INSERT OR REPLACE INTO outcasts VALUES (?, ?)", (put.outcast.worker_id, _pack(put.outcast)))


_APPLY: dict[type, Callable[[sqlite3.Connection, Any], None]] = {
    RowPut: _put_row,
    RowsMoved: _move_rows,
    GroupPut: _put_group,
    BatchPut: _put_batch,
    BatchesDropped: _drop_batches,
    RecordsDropped: _drop_records,
    RunPut: lambda connection, put: _fact(connection, "run", _pack(put.state)),
    AssetsPut: lambda connection, put: _fact(connection, "assets", _pack(put.assets)),
    MetricsPut: _put_metrics,
    MetricsDropped: _drop_metrics,
    EvalPut: _put_eval,
    TokenPut: _put_token,
    PeerPut: _put_peer,
    OutcastPut: _put_outcast,
}


def _record(connection: sqlite3.Connection, key: RowKey) -> bytes:
    found = connection.execute("SELECT record FROM rows WHERE group_id = ? AND idx = ? AND attempt = ?", key).fetchone()
    if found is None or found[0] is None:
        raise LookupError(f"the record of row {key} is not kept any more")
    record: bytes = found[0]
    return record


def _load(connection: sqlite3.Connection) -> Loaded:
    def all_of(query: str, type_: type[T], *parameters: Any) -> tuple[T, ...]:
        return tuple(msgspec.msgpack.decode(value, type=type_) for (value,) in connection.execute(query, parameters))

    facts = dict(connection.execute("SELECT name, value FROM facts").fetchall())
    oldest, newest = connection.execute("SELECT coalesce(min(step), 0), coalesce(max(step), 0) FROM batches").fetchone()
    recent = "ended_at IS NULL OR ended_at >= ?"
    since = min(oldest, newest - REMEMBERED_STEPS)  # A batch that may be replayed needs all of its rows.
    rows: list[Row] = []
    for state, verdict, value in connection.execute(
        f"SELECT state, verdict, value FROM rows WHERE group_id IN (SELECT group_id FROM groups WHERE {recent})",
        (since,),
    ):
        row = msgspec.msgpack.decode(value, type=Row)
        rows.append(msgspec.structs.replace(row, state=RowState(state), verdict=Verdict(verdict)))
    return Loaded(
        state=msgspec.msgpack.decode(facts["run"], type=RunState) if "run" in facts else None,
        groups=all_of(f"SELECT value FROM groups WHERE {recent} ORDER BY group_id", Group, since),
        rows=tuple(rows),
        batches=all_of("SELECT value FROM batches ORDER BY step", Batch),
        counts={RowState(s): n for s, n in connection.execute("SELECT state, count(*) FROM rows GROUP BY state")},
        refused_by={
            Verdict(v): n
            for v, n in connection.execute(
                "SELECT verdict, count(*) FROM rows WHERE state = 'refused' GROUP BY verdict"
            )
        },
        metrics=tuple(line for (line,) in connection.execute("SELECT line FROM metrics ORDER BY step")),
        evals=tuple(line for (line,) in connection.execute("SELECT line FROM evals ORDER BY step")),
        assets=msgspec.msgpack.decode(facts["assets"], type=tuple[AssetFile, ...]) if "assets" in facts else (),
        tokens=all_of("SELECT value FROM tokens", Token),
        peers=all_of("SELECT value FROM peers", Peer),
        outcasts=all_of("SELECT value FROM outcasts ORDER BY worker_id", Outcast),
    )

"""The controller's shell: looks, lets it decide, and carries out what it decided.

    pools ──machines, prices──▶ look ──observation──▶ decide ──▶ starts, releases ──▶ pools
    run   ──workers, times────▶   │                      └─────▶ end ──▶ run

Invariant: every call to a pool has a deadline (I7), no pool that hangs keeps the others from being looked at or the
controller from deciding, and when the loop is left, however it is left, every machine it ordered is given back.

Loops, all in one task group:
    looks     consume time and news of workers; wait for a decision period; unblocked by a loss or the run's end;
              produce decisions, lines of ``events.jsonl``, and the tasks below
    start     (one task per ordered machine) consumes an order; waits at most ``Rules.start_s`` for the pool; produces a
              handle, or a machine that failed
    release   (one task per machine) consumes a release, or a machine that is gone; waits for the worker to leave, at
              most ``DRAIN_S`` or as long as a group takes; produces a stopped machine
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from echo2.errors import Refused, TransportError, first_cause
from echo2.ports import Clock, EventLog
from echo2.provisioning.controller import State, decide
from echo2.provisioning.decisions import Activate, Decision, End, Keep, Release, event
from echo2.provisioning.observation import Listing, Observation, Phase
from echo2.provisioning.pools.pool import Handle, Pool
from echo2.provisioning.rules import Rules

LIST_S = 30.0
"""A pool that takes longer to say what it has is looked at again next time."""
DRAIN_S = 60.0
"""A released worker has so long at least to submit what it holds and leave."""
STOP_S = 60.0
STOP_TRIES = 5
"""A machine that could not be stopped after so many tries is named to people, who must look at the provider."""
STOP_PAUSE_S = 10.0

T = TypeVar("T")


class Past(msgspec.Struct, frozen=True):
    """What outlives the coordinator's process."""

    state: State = State()
    handles: dict[str, tuple[Handle, ...]] = {}
    """By pool, what it said last: a pool that cannot be reached has what it had."""


class Run(Protocol):
    """What the loop needs of the run that it provides for."""

    @property
    def over(self) -> bool:
        """Nothing is needed any more."""
        ...

    @property
    def group_s(self) -> float:
        """A group that was begun is usually over after so long."""
        ...

    def observe(self, handles: Sequence[Handle], listings: Sequence[Listing]) -> Observation:
        """The present, joined from what pools say and what the run knows of workers, times and money."""
        ...

    def remember(self, past: Past) -> None:
        """Make it durable beside the run's own state."""
        ...

    async def drain(self, machine_id: str) -> None:
        """Give its worker no more leases; return when it has left."""
        ...

    def returned(self, machine_id: str) -> None:
        """It was given back: nothing more is billed than its minimum."""
        ...

    def end(self, reason: str) -> None:
        """End the run in order."""
        ...

    async def wait(self, timeout_s: float) -> None:
        """Until a worker was lost or the run is over, or the time has passed."""
        ...


async def drive(
    run: Run, pools: Sequence[Pool], rules: Rules, clock: Clock, events: EventLog, past: Past | None = None
) -> None:
    """Provide for ``run`` until it is over. ``past``: what an earlier life of the coordinator remembered, on this one's
    clock (``State.carried_over``)."""
    shell = _Shell(run, pools, rules, events, Past() if past is None else past)
    try:
        async with asyncio.TaskGroup() as group:
            while not run.over:
                due_s = clock.monotonic() + rules.period_s
                await shell.look(group)
                await run.wait(max(0.0, due_s - clock.monotonic()))
            shell.call_off_starts()
    except BaseExceptionGroup as errors:
        raise first_cause(errors) from errors
    finally:
        await shell.give_all_back()


class _Shell:
    def __init__(self, run: Run, pools: Sequence[Pool], rules: Rules, events: EventLog, past: Past) -> None:
        self.run, self.pools, self.rules, self.events, self.state = run, pools, rules, events, past.state
        self._handles = {pool.name: past.handles.get(pool.name, ()) for pool in pools}
        """By pool, as it said last."""
        self._failed: dict[str, Handle] = {}
        self._pool_of_offer: dict[str, Pool] = {}
        self._pool_of = {handle.machine_id: pool for pool in pools for handle in self._handles[pool.name]}
        """By machine, until it is stopped."""
        self._starts: dict[str, asyncio.Task[None]] = {}
        self._releasing: set[str] = set()
        self._gone: set[str] = set()
        """Machines whose end was told."""
        self._stopped: set[str] = set()
        """What a pool said before it stopped one of these is out of date."""
        self._headline = ""

    # ---- look -----------------------------------------------------------------------------------------------------

    async def look(self, group: asyncio.TaskGroup) -> None:
        """Ask the pools, decide, and begin what was decided."""
        found = await asyncio.gather(*(self._ask(pool) for pool in self.pools))
        listings = [listing for of_pool in found for listing in of_pool]
        there = [handle for of_pool in self._handles.values() for handle in of_pool]
        handles = [handle for handle in there if handle.machine_id not in self._stopped]
        seen = self.run.observe((*handles, *self._failed.values()), listings)
        self.state, decisions = decide(self.state, seen, self.rules)
        self.run.remember(Past(self.state, self._handles))
        for decision in decisions:
            self._tell(decision)
            self._begin(decision, group)
        self._clear(handles, group)

    async def _ask(self, pool: Pool) -> Sequence[Listing]:
        """Its offers now; its machines are noted. A pool that does not answer has those that it had, and no offers."""
        machines = await self._within(LIST_S, pool, "its machines", pool.machines())
        listings = await self._within(LIST_S, pool, "its offers", pool.listings())
        if machines is not None:
            self._tell_gone(pool, machines)
            self._handles[pool.name] = tuple(machines)
            self._pool_of.update((handle.machine_id, pool) for handle in machines)
        self._pool_of_offer.update((listing.offer.name, pool) for listing in listings or ())
        return listings or ()

    async def _within(self, limit_s: float, pool: Pool, what: str, call: Coroutine[Any, Any, T]) -> T | None:
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except (TransportError, Refused, TimeoutError) as error:
            why = str(error) or f"no answer within {limit_s:g} s"
            self.events.emit("pool_unreachable", pool=pool.name, what=what, error=why)
            return None

    def _tell(self, decision: Decision) -> None:
        """A line for every decision; of those to keep things, for the first that says so."""
        headline = decision.reason.partition(";")[0] if isinstance(decision, Keep) else ""
        if not isinstance(decision, Keep) or headline != self._headline:
            kind, fields = event(decision)
            self.events.emit(kind, **fields)
        self._headline = headline

    def _tell_gone(self, pool: Pool, machines: Sequence[Handle]) -> None:
        """A line for each machine that ended without being sent away, with what its provider says of it."""
        for handle in machines:
            name = handle.machine_id
            if handle.phase in (Phase.LOST, Phase.FAILED) and name not in self._gone | self._releasing:
                self._gone.add(name)
                self.events.emit(
                    "machine_gone", machine=name, pool=pool.name, phase=handle.phase.value, detail=handle.detail
                )

    # ---- carry out ------------------------------------------------------------------------------------------------

    def _begin(self, decision: Decision, group: asyncio.TaskGroup) -> None:
        if isinstance(decision, Activate):
            pool = self._pool_of_offer[decision.offer]
            for name in decision.machine_ids:
                self._pool_of[name] = pool
                start = self._start(pool, name, decision)
                self._starts[name] = group.create_task(start, name=f"start {name}")
        elif isinstance(decision, Release):
            self._let_go(decision.machine_id, group)
        elif isinstance(decision, End):
            self.run.end(decision.reason)

    def _clear(self, handles: Sequence[Handle], group: asyncio.TaskGroup) -> None:
        """Machines that were to go and are there, because a stop failed or an earlier life of the coordinator ended
        first; and those that are gone for the run but not for their provider, where a disk may go on costing."""
        for handle in handles:
            name = handle.machine_id
            gone = handle.phase in (Phase.LOST, Phase.FAILED)
            unwanted = name in self.state.roster.dismissed or name in self._failed
            if (gone or unwanted) and name not in self._starts:
                self._let_go(name, group, drains=not gone)

    def _let_go(self, name: str, group: asyncio.TaskGroup, *, drains: bool = True) -> None:
        if name not in self._releasing:
            self._releasing.add(name)
            group.create_task(self._release(name, drains=drains), name=f"release {name}")

    async def _start(self, pool: Pool, name: str, order: Activate) -> None:
        handle = await self._within(self.rules.start_s, pool, f"a start of {name}", pool.start(name, order.offer))
        if handle is None:
            failed = Handle(machine_id=name, offer=order.offer, phase=Phase.FAILED, usd_per_h=order.usd_per_h)
            self._failed[name] = failed
            await self._stop(name)  # It may have been carried out all the same.
        del self._starts[name]

    async def _release(self, name: str, *, drains: bool) -> None:
        try:
            async with asyncio.timeout(patience_s := max(DRAIN_S, self.run.group_s)):
                if drains:
                    await self.run.drain(name)
        except TimeoutError:
            self.events.emit("drain_timed_out", machine=name, waited_s=patience_s)
        await self._stop(name)
        self._releasing.discard(name)

    async def _stop(self, name: str) -> None:
        pool = self._pool_of.get(name)
        if pool is None:
            return
        for _ in range(STOP_TRIES):
            try:
                async with asyncio.timeout(STOP_S):
                    await pool.stop(name)
            except (TransportError, Refused, TimeoutError) as error:
                self.events.emit("stop_failed", machine=name, pool=pool.name, error=str(error) or "no answer in time")
                await asyncio.sleep(STOP_PAUSE_S)
            else:
                self._pool_of.pop(name, None)
                self._stopped.add(name)
                self.run.returned(name)
                self.events.emit("machine_stopped", machine=name, pool=pool.name)
                return
        self.events.emit("machine_may_still_cost", machine=name, pool=pool.name, tries=STOP_TRIES)

    # ---- the end --------------------------------------------------------------------------------------------------

    def call_off_starts(self) -> None:
        for start in self._starts.values():
            start.cancel()

    async def give_all_back(self) -> None:
        """Every machine that was ordered or found and not stopped, at once."""
        await asyncio.gather(*(self._stop(name) for name in sorted(self._pool_of)))

"""All programs of a run on this machine: what ``echo2 train`` is.

    coordinator ──writes coordinator.json, join/*──▶ learner, workers ──▶ … ──coordinator leaves──▶ everybody leaves

Invariant: the run ends when its coordinator does; every other program is restarted while the coordinator lives, and
nothing is left running when ``run`` returns or raises.

| loop        | consumes         | waits for                | unblocked by              | produces                |
|-------------|------------------|--------------------------|---------------------------|-------------------------|
| coordinator | its process      | its end                  | the run's end, its death  | the end of the run      |
| others      | their processes  | their end                | a crash, the run's end    | restarts, or an error   |
| stop        | a wish to stop   | the coordinator's answer | people                    | an orderly end          |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import msgspec

from echo2.config.root import Config
from echo2.errors import Echo2Error, Refused, TransportError, UserError, first_cause
from echo2.ports import EventLog
from echo2.run.child import Child, ChildSpec, Ending, server_arguments
from echo2.run.folder import RunFolder
from echo2.run.threads import worker_threads

START_LIMIT_S = 300.0
"""Until the coordinator listens, restarts and slow disks included."""
STOP_LIMIT_S = 180.0
"""For an orderly end: the learner finishes its step and checkpoint, workers their groups; cutting it short is safe."""
LEAVE_LIMIT_S = 30.0
"""For the others to leave after the coordinator left."""
TERM_LIMIT_S = 15.0
"""Between asking a program to leave and making it."""
POLL_S = 0.1

TellStop = Callable[[str], Awaitable[None]]
"""Says StopRun to the coordinator. Raises TransportError or Refused."""


class RunEnded(msgspec.Struct, frozen=True):
    reason: str
    """Empty for a run that did all its steps; else why it stopped early."""


class RunSpecs(msgspec.Struct, frozen=True):
    coordinator: ChildSpec
    learner: ChildSpec
    workers: tuple[ChildSpec, ...]


class Launch:
    def __init__(self, specs: RunSpecs, folder: RunFolder, events: EventLog, tell_stop: TellStop) -> None:
        self._folder = folder
        self._events = events
        self._tell_stop = tell_stop
        self._stop_asked = asyncio.Event()
        self._hurry = asyncio.Event()
        self._stop_reason = ""
        self._coordinator = Child(specs.coordinator, events)
        self._workers = [Child(spec, events) for spec in specs.workers]
        self._others = [Child(specs.learner, events), *self._workers]
        self._given_up: list[Child] = []

    def stop(self, reason: str) -> None:
        """End the run in order; a second call does not wait for order any more."""
        if self._stop_asked.is_set():
            self._hurry.set()
        self._stop_reason = self._stop_reason or reason
        self._stop_asked.set()

    async def run(self) -> RunEnded:
        """Run to the end. Raises UserError (a program found the user's input wrong), Echo2Error (it cannot go on)."""
        self._folder.coordinator.unlink(missing_ok=True)
        try:
            async with asyncio.TaskGroup() as group:
                stopper = group.create_task(self._stop_when_asked(), name="stop")
                lives = group.create_task(self._live_with_coordinator(), name="programs")
                await lives
                stopper.cancel()
        except BaseExceptionGroup as group_error:
            raise first_cause(group_error) from group_error
        return RunEnded(self._stop_reason)

    # ---- programs ----------------------------------------------------------------------------------------------

    async def _live_with_coordinator(self) -> None:
        """Start everybody once the coordinator listens; when it leaves, see everybody off."""
        async with asyncio.TaskGroup() as group:
            coordinator = group.create_task(self._coordinator.run(), name="coordinator")
            others = group.create_task(self._start_others(), name="others")
            self._fail_unless_left(self._coordinator, await coordinator)
            self._events.emit("coordinator_left")
            # It told everybody to leave; who did not hear it in time is asked, then made to.
            await asyncio.wait([others], timeout=0.0 if self._hurry.is_set() else LEAVE_LIMIT_S)
            await self._end_others()
            others.cancel()

    async def _end_others(self) -> None:
        async with asyncio.TaskGroup() as group:
            for child in self._others:
                group.create_task(child.end(TERM_LIMIT_S), name=f"end {child.spec.name}")

    async def _start_others(self) -> None:
        async with asyncio.timeout(START_LIMIT_S):
            while not self._listens():
                if self._coordinator.is_over:
                    return
                await asyncio.sleep(POLL_S)
        async with asyncio.TaskGroup() as group:
            for child in self._others:
                group.create_task(self._keep(child), name=child.spec.name)

    def _listens(self) -> bool:
        process = self._coordinator.process
        try:
            told = json.loads(self._folder.coordinator.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        return process is not None and told.get("pid") == process.pid

    async def _keep(self, child: Child) -> None:
        ending = await child.run()
        self._events.emit("program_ended", program=child.spec.name, how=ending.value, restarts=child.restarts)
        if self._coordinator.is_over:
            return
        if ending is Ending.GIVEN_UP and child in self._workers:
            self._given_up.append(child)
            if len(self._given_up) < len(self._workers):
                return  # the other workers carry the run; the event and the log say what happened
        self._fail_unless_left(child, ending)

    @staticmethod
    def _fail_unless_left(child: Child, ending: Ending) -> None:
        if ending is Ending.USER_ERROR:
            raise UserError(child.last_words())
        if ending is Ending.GIVEN_UP:
            raise Echo2Error(f"{child.spec.name} ended: {child.last_words()} (log: {child.spec.log})")

    # ---- stopping ----------------------------------------------------------------------------------------------

    async def _stop_when_asked(self) -> None:
        await self._stop_asked.wait()
        self._events.emit("stopping", reason=self._stop_reason)
        if self._listens() and await self._tell_coordinator():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STOP_LIMIT_S):
                    await self._hurry.wait()  # the end of the run cancels this loop
        await self._end_others()
        await self._coordinator.end(TERM_LIMIT_S)

    async def _tell_coordinator(self) -> bool:
        try:
            await self._tell_stop(self._stop_reason)
        except (TransportError, Refused) as error:
            self._events.emit("stop_unheard", error=str(error))
            return False
        return True


def specs_of(config: Config, folder: RunFolder) -> RunSpecs:
    """What ``echo2 train`` starts for this configuration."""
    root = str(folder.root)
    # Exit code 1 of a coordinator is its verdict on the run (starved, broken store): not worth another try.
    coordinator = ChildSpec(
        "coordinator", ("coordinator", root), folder.log("coordinator"), threads=1, restartable=False
    )
    learner = ChildSpec(
        "learner", ("learner", root, "--join", str(folder.join("learner"))), folder.log("learner"),
        threads=config.learning.threads,
    )  # fmt: skip
    threads = worker_threads(config) if config.workers.local else 0
    workers = tuple(_worker_spec(config, folder, number, threads) for number in range(config.workers.local))
    return RunSpecs(coordinator, learner, workers)


def _worker_spec(config: Config, folder: RunFolder, number: int, threads: int) -> ChildSpec:
    name = f"w{number}"
    arguments = (
        "worker", str(folder.join("worker")), "--name", name, "--dir", str(folder.worker(name)),
        "--device", config.workers.device, "--threads", str(threads),
        *server_arguments(config.rollout.engine, folder.config),
    )  # fmt: skip
    return ChildSpec(f"worker {name}", arguments, folder.log(f"worker-{name}"), threads=threads)

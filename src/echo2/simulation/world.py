"""A run in virtual time: the production coordinator, learner and worker programs in a modelled world.

Invariant (I10): same configuration, same models, same seed, same scenario → the same event log. Programs may be killed
and started again at any moment; what they wrote to their disks is all that is left of them.

    World ─┬─ Desk ◀── VirtualLine ── LearnerProgram(ModelledLearner)
           ├─ Coordinator(MemoryStore, MemoryShelf)
           └─ Desk ◀── VirtualLine ── Worker(scripted engine, MemoryStock, MemorySpool) × n ◀── ModelledPool
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from echo2.config.root import Config
from echo2.coordinator.fleet import WorkerRecord
from echo2.coordinator.operations import Peer
from echo2.coordinator.program import Coordinator
from echo2.data.registry import load_tasks
from echo2.errors import Echo2Error, first_cause
from echo2.learner.program import LearnerProgram
from echo2.metrics import StepMetrics
from echo2.simulation import programs
from echo2.simulation.attendance import Attendance
from echo2.simulation.clock import CountedIds, VirtualClock
from echo2.simulation.fates import slow_down, suffer
from echo2.simulation.flows import Flows
from echo2.simulation.lines import OnStep, WatchedLines
from echo2.simulation.links import Access, Desk, LinkModel, VirtualLine
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemoryDisk, MemorySpool, MemoryStore
from echo2.simulation.models import LearnerDisk, WorkerModel, WorldModel
from echo2.simulation.pausing import PausingEngine
from echo2.simulation.pool import MachineModel, ModelledPool
from echo2.simulation.programs import COORDINATOR, LEARNER, PRIVATE_KEY, make_relays
from echo2.simulation.record import RecordedEvents
from echo2.simulation.shelf import MemoryShelf
from echo2.transport.join import JoinString
from echo2.transport.messages import PROTOCOL_VERSION, Enrol, Principal, Role
from echo2.types import Policy
from echo2.version import VERSION
from echo2.worker.program import Worker

ENDING_S = 90.0
"""Virtual time that learner and workers get to leave after the coordinator is done."""


class SimulatedRun(msgspec.Struct):
    events: list[dict[str, object]]
    metrics: list[StepMetrics]
    weights: str
    """Hash chain of the batches the learner's durable weights were trained on."""
    ended_s: float


Scenario = Callable[["World"], Awaitable[None]]
"""What happens to the world beside the run: crashes, cut lines, new workers."""


class World:
    """Everything that outlives a program, and the programs' present lives."""

    def __init__(
        self,
        config: Config,
        model: WorldModel,
        workers: Sequence[WorkerModel],
        seed: int,
        machines: Mapping[str, MachineModel] = {},
        on_step: OnStep | None = None,
    ) -> None:
        self.config = config
        self.model = model
        self.seed = seed
        self.events = RecordedEvents("world")
        self.lines = WatchedLines(on_step)
        self.store = MemoryStore(model.commit_s, [_peer(w) for w in workers if w.usd_per_h is not None])
        self.shelf = MemoryShelf(PRIVATE_KEY)
        self.disk = MemoryDisk()
        self.learner_disk = LearnerDisk()
        self.desk = Desk()
        self.flows = Flows()
        self.home = Access(LinkModel(latency_s=0.0, bytes_per_s=model.uplink_bytes_per_s))
        """The coordinator's line."""
        self.relays = make_relays(config, model, self.home, self.shelf, self.flows)
        self.tasks = load_tasks(config.tasks)
        self.ids = CountedIds()
        self.workers = {worker.name: worker for worker in workers}
        self.spools = {worker.name: MemorySpool() for worker in workers}
        self.links: dict[str, VirtualLine] = {}
        self.programs: dict[str, Worker | LearnerProgram | Coordinator] = {}
        self.done = asyncio.Event()
        """The coordinator ended the run in order."""
        self.faults: dict[str, BaseException] = {}
        """What a program's last life ended with, when that was an error."""
        self.pausing: dict[str, PausingEngine] = {}
        """Engines that stand still while a snapshot is on its way."""
        self.pool = ModelledPool(machines, VirtualClock(model.home_skew_s), self._rent, self._give_back)
        voice = self.events.of(COORDINATOR)
        voice.listen("published", self._published)
        heartbeat_s, dead_after_s = config.coordinator.heartbeat_s, config.coordinator.dead_after_s
        # Machines that are given back are told by the next beat; where there are none, looks are for liveness alone.
        look_s = heartbeat_s if machines or config.pools else max(heartbeat_s, dead_after_s / 8)
        self.attendance = Attendance(self.desk, voice, self._known_workers, heartbeat_s, look_s)
        self._slowness: dict[str, float] = {}
        """Of programs that take so many times as long as they are modelled."""
        self._peer_ids: dict[str, str] = {}
        """Of enrolled workers, by name; the others are known by their names."""
        self._fates: list[asyncio.Task[None]] = []
        self._lives: dict[str, asyncio.Task[None]] = {}
        self._born: dict[str, int] = {}
        self._group: asyncio.TaskGroup | None = None

    # ---- lives -------------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Begin a (new) life of ``coordinator``, ``learner`` or a worker."""
        assert self._group is not None, "inside World.run"
        assert name not in self._lives or self._lives[name].done(), f"{name} lives already"
        live = {COORDINATOR: self._coordinator, LEARNER: self._learner}.get(name)
        self._born[name] = self._born.get(name, 0) + 1
        work = live() if live is not None else self._worker(self.workers[name])
        self._lives[name] = self._group.create_task(self._life(name, work), name=name)

    async def kill(self, name: str) -> None:
        """End a life at once, as kill -9 does: nothing it does while dying reaches anybody."""
        self.events.emit("killed", program=name)
        if name == COORDINATOR:
            self.pool.invite = None
        life = self._lives[name]
        # Cancelled before its line is cut: a task group that fails first swallows a cancellation, before Python 3.13.
        life.cancel()
        line = self.links.get(name)
        if line is not None:
            line.cut = True
        self.desk.hang_up(self._peer_ids.get(name, name))
        await asyncio.wait([life])

    async def preempt(self, name: str) -> None:
        """Its machine is taken away."""
        if self.pool.has(name):
            await self.pool.preempt(name)
        else:
            await self.kill(name)

    def is_given_back(self, name: str) -> bool:
        """Its machine was rented and is no more."""
        return name in self._peer_ids and not self.pool.has(name)

    def slow(self, name: str, factor: float) -> None:
        """From now on the learner, or a worker, takes so many times as long."""
        self.events.emit("slowed", program=name, factor=factor)
        self._slowness[name] = factor

    def working(self) -> list[str]:
        """Workers that live."""
        return [name for name in self.workers if name in self._lives and not self._lives[name].done()]

    def drain(self, name: str) -> None:
        worker = self.programs[name]
        assert isinstance(worker, Worker)
        worker.drain("asked by the scenario")

    async def _life(self, name: str, work: Awaitable[None]) -> None:
        self.faults.pop(name, None)
        try:
            await work
        except* Echo2Error as group_error:
            error = first_cause(group_error)
            self.faults[name] = error
            self.events.emit("program_failed", program=name, error=f"{type(error).__name__}: {error}")
            if name == COORDINATOR:
                raise
        else:
            self.events.emit("program_left", program=name)

    async def run(self, scenario: Scenario | None) -> None:
        """From nothing to the ordered end of the run. Raises what the coordinator ended with."""
        try:
            async with asyncio.TaskGroup() as group:
                self._group = group
                models = list(self.workers.values())
                for name in (COORDINATOR, LEARNER, *(model.name for model in models if not model.fate.arrives_s)):
                    self.start(name)
                for model in models:
                    self._begin_fate(model)
                story = None if scenario is None else group.create_task(_story(scenario, self), name="scenario")
                await self.done.wait()
                if story is not None:
                    story.cancel()
                for fate in self._fates:
                    fate.cancel()
                left = [life for life in self._lives.values() if not life.done()]
                if left:
                    await asyncio.wait(left, timeout=ENDING_S)
                for life in left:
                    life.cancel()
        except BaseExceptionGroup as group_error:
            raise first_cause(group_error) from group_error

    def _begin_fate(self, model: WorkerModel) -> None:
        assert self._group is not None, "inside World.run"
        if not model.is_undisturbed:
            self._fates.append(self._group.create_task(self._befall(model), name=f"fate of {model.name}"))

    async def _befall(self, model: WorkerModel) -> None:
        """Begin a worker when it arrives; then what its fate brings."""
        name = model.name
        if model.fate.arrives_s:
            await asyncio.sleep(model.fate.arrives_s)
            self.start(name)
        async with asyncio.TaskGroup() as group:
            group.create_task(suffer(self, name, model.fate, Random(f"{self.seed}/fate {name}")))
            group.create_task(slow_down(self, name, model.fate.spells, Random(f"{self.seed}/spells {name}")))

    # ---- programs ----------------------------------------------------------------------------------------------

    async def _coordinator(self) -> None:
        coordinator = await programs.coordinator(self)
        coordinator.invitations.open(JoinString(COORDINATOR, 1, False, "unused"))
        self.programs[COORDINATOR] = coordinator
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.desk.serve(coordinator, ended), name="desk")
            attending = group.create_task(self.attendance.run(), name="attendance")
            await coordinator.run()
            attending.cancel()
            ended.set()
        self.done.set()

    async def _learner(self) -> None:
        program = self.programs[LEARNER] = programs.learner(self)
        await program.run()

    async def _worker(self, model: WorkerModel) -> None:
        worker = self.programs[model.name] = programs.worker(self, model)
        await worker.run()

    async def _rent(self, name: str, join: str, machine: MachineModel) -> None:
        coordinator = self.programs[COORDINATOR]
        assert isinstance(coordinator, Coordinator)
        token = JoinString.parse(join).token
        enrolled = await coordinator.enrol(Enrol(token, name, PROTOCOL_VERSION, VERSION))
        self._peer_ids[name] = enrolled.peer_id
        model = self.workers[name] = machine.worker_named(name)
        self.spools[name] = MemorySpool()
        self.start(name)
        self._begin_fate(model)

    async def _give_back(self, name: str) -> None:
        if name in self._lives and not self._lives[name].done():
            await self.kill(name)

    def _published(self, event: Mapping[str, Any]) -> None:
        incarnation, _, version = str(event["policy"]).partition(".")
        for engine in self.pausing.values():
            engine.published(Policy(int(incarnation), int(version)))

    def _known_workers(self) -> Mapping[str, WorkerRecord]:
        """As the coordinator's present life knows them."""
        coordinator = self.programs.get(COORDINATOR)
        alive = self.desk.is_open and isinstance(coordinator, Coordinator)
        return coordinator.books.fleet.workers if alive and isinstance(coordinator, Coordinator) else {}

    def line(self, name: str, role: Role, link: LinkModel) -> VirtualLine:
        """The connection of a program's new life."""
        principal = Principal(role, self._peer_ids.get(name, name))
        line = self.links[name] = VirtualLine(
            self.desk, principal, link, self.random(f"line {name}"), self.random(f"beats {name}")
        )
        return line

    def slowness(self, name: str) -> float:
        return self._slowness.get(name, 1.0)

    def random(self, purpose: str) -> Random:
        """A stream of its own per program and life, so that one more draw here changes nothing there."""
        return Random(f"{self.seed}/{purpose}/{self._born.get(purpose, 0)}")


def _peer(worker: WorkerModel) -> Peer:
    """As if it had enrolled, with what its owner says that it costs."""
    return Peer(worker.name, worker.name, Role.WORKER, f"credential of {worker.name}", usd_per_h=worker.usd_per_h)


async def _story(scenario: Scenario, world: World) -> None:
    await scenario(world)


def simulate(
    config: Config,
    workers: Sequence[WorkerModel],
    *,
    seed: int = 0,
    model: WorldModel = WorldModel(),  # noqa: B008  frozen
    scenario: Scenario | None = None,
    machines: Mapping[str, MachineModel] = {},
    until_s: float = 7 * 24 * 3600.0,
    on_step: OnStep | None = None,
) -> SimulatedRun:
    """Run to the end in virtual time. Raises Deadlock when nothing can go on or ``until_s`` passed; Starved when the
    run's own watchdog ended it.  machines: what can be rented, by name of the offer."""

    async def main() -> SimulatedRun:
        world = World(config, model, workers, seed, machines, on_step)
        await world.run(scenario)
        return SimulatedRun(
            world.events.events, world.lines.metrics, world.learner_disk.weights, asyncio.get_running_loop().time()
        )

    return run_virtual(main(), until_s=until_s)

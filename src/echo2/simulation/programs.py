"""The production programs on a world's modelled ports.

Invariant: nothing here decides anything; each function joins one program to what stands for its machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

from echo2.broadcast.plan.model import Topology
from echo2.broadcast.signing import public_key
from echo2.config.root import Config
from echo2.coordinator.program import Coordinator
from echo2.data.chat import ByteChat
from echo2.data.cursor import PromptCursor
from echo2.learner.program import LearnerOptions, LearnerProgram
from echo2.ports import SnapshotSource
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.standby import Benches, StandbyPool
from echo2.rollout.engines.scripted import ScriptedEngine, improving_sums
from echo2.simulation import coin
from echo2.simulation.attendance import QuietPulse
from echo2.simulation.clock import VirtualClock
from echo2.simulation.flows import Flows
from echo2.simulation.links import Access
from echo2.simulation.models import ModelledLearner, WorkerModel, WorldModel
from echo2.simulation.nodes import NodeRelays
from echo2.simulation.pausing import PausingEngine
from echo2.simulation.planned import PlannedRelays
from echo2.simulation.relaying import Relayed, Relays
from echo2.simulation.scoring import ScoredAtOnce
from echo2.simulation.shelf import MemoryShelf
from echo2.simulation.snapshots import MemoryStock, ModelledPacker, SharedTerms
from echo2.simulation.sources import DirectLine, NoRelays
from echo2.transport.messages import MAX_WAIT_S, Role
from echo2.worker.program import Worker, WorkerOptions
from echo2.worker.pulse import SteadyPulse

if TYPE_CHECKING:
    from echo2.simulation.world import World

RUN_ID = "run-simulated"
PRIVATE_KEY = bytes(range(32))
PUBLIC_KEY = public_key(PRIVATE_KEY)
LEARNER = "learner"
COORDINATOR = "coordinator"
LONGEST_POLL_S = 1e9
"""A modelled line holds a question until there is an answer."""


def make_relays(config: Config, model: WorldModel, home: Access, shelf: MemoryShelf, flows: Flows) -> Relays | None:
    """None where objects come from the coordinator itself."""
    if model.relays == "none":
        return None
    topology, gamma = Topology(config.broadcast.topology), config.provisioning.gamma
    if model.relays == "nodes":
        return NodeRelays(topology, gamma, home, shelf, flows, PUBLIC_KEY)
    return PlannedRelays(topology, gamma, home, shelf, flows, model.pieces)


async def coordinator(world: World) -> Coordinator:
    """A new life, from what the last one made durable."""
    config, clock = world.config, VirtualClock(world.model.home_skew_s)
    weighted = [(world.tasks[section.called], section.weight) for section in config.tasks]

    def pools(invite: Invite, benches: Benches) -> Sequence[Pool]:
        standby = [section for section in config.pools if section.kind == "standby"]
        made: list[Pool] = [StandbyPool(benches, section.rollouts_per_s, clock) for section in standby]
        if world.pool.machines_of:
            world.pool.invite = invite
            made.append(world.pool)
        return made

    return Coordinator(
        config, world.store, await world.store.load(), world.shelf, PromptCursor(weighted, config.run.seed), clock,
        world.ids, world.events.of(COORDINATOR), world.lines, world.relays or NoRelays(), run_id=RUN_ID,
        snapshot_public_key=PUBLIC_KEY, pools=pools,
        longest_wait_s=MAX_WAIT_S if world.model.plays_heartbeats else LONGEST_POLL_S, scorer=ScoredAtOnce(world.tasks),
    )  # fmt: skip


def learner(world: World) -> LearnerProgram:
    config, model, random = world.config, world.model, world.random(LEARNER)
    modelled = ModelledLearner(
        model.learner, RUN_ID, config.model.snapshot_dtype, world.learner_disk, world.disk, random,
        lambda: world.slowness(LEARNER),
    )  # fmt: skip
    line = world.line(LEARNER, Role.LEARNER, model.learner_link)
    options = LearnerOptions(
        run_id=RUN_ID,
        initial_weights_hash="initial",
        assets={},
        checkpoint_every_publishes=config.checkpoint.every_publishes,
        jitter_seed=random.getrandbits(32),
    )
    direct = DirectLine(line, world.shelf, world.home.up, world.disk, world.flows)
    packer = ModelledPacker(world.disk, model.delta_bytes)
    events = world.events.of(LEARNER)
    return LearnerProgram(line, direct, modelled, packer, VirtualClock(model.home_skew_s), events, options)


def worker(world: World, model: WorkerModel) -> Worker:
    config, random = world.config, world.random(model.name)
    line = world.line(model.name, Role.WORKER, model.link)
    engine = _engine(world, model)
    played = world.model.plays_heartbeats
    options = WorkerOptions(
        snapshots=SharedTerms(RUN_ID, PUBLIC_KEY, config.model.snapshot_dtype),
        heartbeat_s=config.coordinator.heartbeat_s,
        concurrent_groups=config.rollout.concurrent_groups,
        orphan_after_s=config.workers.orphan_after_s,
        thinking=config.rollout.thinking,
        jitter_seed=random.getrandbits(32),
        poll_s=MAX_WAIT_S if played else LONGEST_POLL_S,
    )
    beats = world.random(f"pulse {model.name}")
    pulse = SteadyPulse(options.heartbeat_s, beats) if played else QuietPulse(world.attendance, line, beats)
    stock = MemoryStock(world.disk, Path("workers") / model.name, model.decode_s)
    source: SnapshotSource = DirectLine(line, world.shelf, world.home.up, world.disk, world.flows)
    if world.relays is not None:
        source = Relayed(world.relays, line, stock, world.shelf, world.disk)
    return Worker(
        line, source, stock, engine, world.tasks, ByteChat(), world.spools[model.name],
        VirtualClock(model.clock_skew_s), world.events.of(model.name), options, pulse,
    )  # fmt: skip


def _engine(world: World, model: WorkerModel) -> ScriptedEngine:
    def duration(prompt_tokens: int, replies: int, draws: Random) -> float:
        return world.slowness(model.name) * _group_s(world.config, model, replies, draws)

    script = coin.call if any(section.name == coin.NAME for section in world.config.tasks) else improving_sums
    if not world.model.pauses:
        return ScriptedEngine(script, duration=duration, activation_s=model.activation_s)
    engine = PausingEngine(script, duration=duration, activation_s=model.activation_s)
    world.pausing[model.name] = engine
    return engine


def _group_s(config: Config, model: WorkerModel, replies: int, random: Random) -> float:
    """The random numbers are the lease's: a group that is generated twice takes the same time."""
    if model.engine is None:
        return model.group_s * random.lognormvariate(0.0, model.spread)
    return model.engine.group_s(random, replies, config.rollout.max_new_tokens, config.rollout.concurrent_groups)

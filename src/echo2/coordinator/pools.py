"""The pools of a run's configuration.

Invariant: whatever can be wrong with them is told before anything is started.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from echo2.config.root import Config
from echo2.config.sections import PoolSection
from echo2.errors import UserError
from echo2.ports import Clock
from echo2.provisioning.estimate import Workload
from echo2.provisioning.offers import Offer, read_offers
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.local import LocalPool, Program
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.ray import RayPool
from echo2.provisioning.pools.ray_offers import Needs, RayOffer
from echo2.provisioning.pools.skypilot import CATALOG, SkyPilotPool
from echo2.provisioning.pools.skypilot_market import Rentable
from echo2.provisioning.pools.skypilot_worker import WorkerPlan
from echo2.provisioning.pools.standby import Benches, StandbyPool
from echo2.run.child import environment, server_arguments
from echo2.run.folder import RunFolder
from echo2.run.threads import worker_threads
from echo2.transport.join import ENVIRONMENT_KEY

LISTED = ("local", "ray")
"""Pools whose offers are a file."""
MakePools = Callable[[Invite, Benches], Sequence[Pool]]


def no_pools(invite: Invite, benches: Benches) -> Sequence[Pool]:
    """Workers are whoever joins."""
    return ()


class RayOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``options`` of a ray pool."""

    address: str = "auto"
    """Of the cluster, as for ``ray.init``; ``auto`` is the one of this machine."""
    folder: str = "~/echo2-worker"
    """On every node, where workers keep credential, spool and snapshots."""
    needs: Needs = Needs()
    """What one machine takes of the cluster."""
    needs_of: dict[str, Needs] = {}
    """The same by offer, where they differ."""


class SkyPilotOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``options`` of a skypilot pool."""

    machines: tuple[Rentable, ...]
    worker: WorkerPlan = WorkerPlan()
    workload: Workload | None = None
    """What throughputs are estimated from that nobody measured."""
    catalog: str = ""
    """Folder of SkyPilot's catalog; empty for where it is on this machine."""


def pools_of(config: Config, folder: RunFolder, run_id: str, clock: Clock) -> MakePools:
    """Raises UserError for offers and options that cannot be read, or a package that is missing."""
    offers = {section.kind: read_offers(Path(section.offers)) for section in config.pools if section.kind in LISTED}
    names = Counter(offer.name for of_pool in offers.values() for offer in of_pool)
    if doubled := [name for name, times in names.items() if times > 1]:
        raise UserError(
            f"offers of all pools must have different names, got {doubled[0]!r} in two pools: rename one of them"
        )
    makers = [_maker(section, offers.get(section.kind, ()), config, folder, run_id, clock) for section in config.pools]
    return lambda invite, benches: [make(invite, benches) for make in makers]


def _maker(
    section: PoolSection, offers: Sequence[Offer], config: Config, folder: RunFolder, run_id: str, clock: Clock
) -> Callable[[Invite, Benches], Pool]:
    if section.kind == "standby":
        return lambda invite, benches: StandbyPool(benches, section.rollouts_per_s, clock)
    if section.kind == "skypilot":
        options = _options(section, SkyPilotOptions)
        catalog = Path(options.catalog) if options.catalog else CATALOG
        return lambda invite, benches: SkyPilotPool(
            run_id, options.machines, options.worker, invite, clock, catalog=catalog, workload=options.workload
        )
    if section.kind == "local":
        LocalPool.check(offers)
        threads = worker_threads(config)
        return lambda invite, benches: LocalPool(
            offers, invite, lambda name, join: _program(config, folder, name, join, threads), clock
        )
    ray = _options(section, RayOptions)
    placed = [RayOffer(offer, ray.needs_of.get(offer.name, ray.needs)) for offer in offers]
    log = folder.log("ray")
    return lambda invite, benches: RayPool(run_id, placed, invite, clock, log, address=ray.address, folder=ray.folder)


_Options = TypeVar("_Options", RayOptions, SkyPilotOptions)


def _options(section: PoolSection, kind: type[_Options]) -> _Options:
    try:
        return msgspec.convert(section.options, kind)
    except msgspec.ValidationError as error:
        raise UserError(f"options of the {section.kind} pool: {error}; docs/pools.md has them") from None


def _program(config: Config, folder: RunFolder, machine_id: str, join: str, threads: int) -> Program:
    command = (
        sys.executable, "-m", "echo2", "worker", "--name", machine_id, "--dir", str(folder.worker(machine_id)),
        "--device", config.workers.device, "--threads", str(threads),
        *server_arguments(config.rollout.engine, folder.config),
    )  # fmt: skip
    around = {**environment(os.environ, threads), ENVIRONMENT_KEY: join}
    return Program(command, around, folder.log(f"worker-{machine_id}"))

"""The pools of a run's configuration.

Invariant: whatever can be wrong with them is told before anything is started.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from echo2.config.root import Config
from echo2.config.sections import PoolSection
from echo2.ports import Clock
from echo2.provisioning.offers import read_offers
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.local import LocalPool, Program
from echo2.provisioning.pools.pool import Pool
from echo2.provisioning.pools.standby import Benches, StandbyPool
from echo2.run.child import environment
from echo2.run.folder import RunFolder
from echo2.transport.join import ENVIRONMENT_KEY

MakePools = Callable[[Invite, Benches], Sequence[Pool]]


def no_pools(invite: Invite, benches: Benches) -> Sequence[Pool]:
    """Workers are whoever joins."""
    return ()


def pools_of(config: Config, folder: RunFolder, clock: Clock) -> MakePools:
    """Raises UserError for offers that cannot be read."""
    offers = {pool.kind: read_offers(Path(pool.offers)) for pool in config.pools if pool.kind == "local"}

    def make(invite: Invite, benches: Benches) -> Sequence[Pool]:
        return [_pool(section, invite, benches) for section in config.pools]

    def _pool(section: PoolSection, invite: Invite, benches: Benches) -> Pool:
        if section.kind == "standby":
            return StandbyPool(benches, section.rollouts_per_s, clock)
        return LocalPool(offers[section.kind], invite, lambda name, join: _program(config, folder, name, join), clock)

    return make


def _program(config: Config, folder: RunFolder, machine_id: str, join: str) -> Program:
    command = (
        sys.executable, "-m", "echo2", "worker", "--name", machine_id, "--dir", str(folder.worker(machine_id)),
        "--device", config.workers.device, "--threads", str(config.workers.threads),
    )  # fmt: skip
    around = {**environment(os.environ, config.workers.threads), ENVIRONMENT_KEY: join}
    return Program(command, around, folder.log(f"worker-{machine_id}"))

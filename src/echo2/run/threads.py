"""CPU threads of the workers on the coordinator's machine.

Invariant: they and the learner take the machine's cores once, however many are started by ``echo2 train`` and by the
local pool; only a number in the configuration says otherwise. Threads that wait for a core hold up the whole step of
their program: two threads where others compute can take ten times as long as one.
"""

from __future__ import annotations

from pathlib import Path

from echo2.config.root import Config
from echo2.cores import share_of, usable_cores
from echo2.provisioning.offers import read_offers

LEARNER = 1


def worker_threads(config: Config) -> int:
    """Of each of them. Raises UserError for offers of the local pool that cannot be read."""
    if config.workers.threads:
        return config.workers.threads
    pooled = sum(
        offer.count for pool in config.pools if pool.kind == "local" for offer in read_offers(Path(pool.offers))
    )
    return share_of(usable_cores(), LEARNER + config.workers.local + pooled)

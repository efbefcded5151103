"""What is measured of a broadcast, and what it is compared with.

Invariant: pure; seconds, bytes and bytes per second throughout; every time counts from the moment the sender was told.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from bench.wan.network import Host, Window

MIB = 1 << 20
SEED_HOST = 0
"""The learner's side; workers are the hosts from 1 on."""
EMULATOR_LIMIT, MACHINE_LIMIT = 0.8, 0.95
"""Share of a core, and of all cores, above which the emulator or the machine may be what limits; such a run says
nothing about a broadcast."""
FAULT_AT = 0.4
"""Share of the object that the victim has when the fault strikes."""


class Fault(StrEnum):
    """What happens to a relay in the middle of the longest chain."""

    KILL = "kill"
    """The process is gone, and its kernel says so to the others."""
    FREEZE = "freeze"
    """It stays and answers nothing, like a machine whose line was cut."""


@dataclass(frozen=True)
class Transfer:
    """One object, from the order to send it until the last worker had it."""

    arrived_s: Mapping[int, float]
    """Per worker: when it had everything, verified."""
    window: Window
    cpu_s: Mapping[int, float]
    """Per host: CPU seconds of its process."""
    machine_share: float
    """Share of all cores of this machine that were busy, whoever kept them busy."""
    victim: int | None = None
    """The worker that was killed or frozen; it is not among the others."""


def share_count(workers: int, share: float) -> int:
    """How many workers make up the share."""
    return max(1, math.ceil(share * workers - 1e-9))


def time_of_share(arrived_s: Mapping[int, float], share: float) -> float:
    return sorted(arrived_s.values())[share_count(len(arrived_s), share) - 1]


def lower_bound_s(size_bytes: int, seed: Host, workers: Sequence[Host], share: float) -> float:
    """No scheme serves the share sooner: max{G/B_0, G/d_(m), m G/(B_0 + sum of u)} (Kumar and Ross, HotWeb 2006)."""
    count = share_count(len(workers), share)
    down = sorted((worker.down_bytes_per_s for worker in workers), reverse=True)[count - 1]
    together = seed.up_bytes_per_s + sum(worker.up_bytes_per_s for worker in workers)
    return max(size_bytes / seed.up_bytes_per_s, size_bytes / down, count * size_bytes / together)


def limits(transfer: Transfer) -> list[str]:
    """What besides the network may have held the transfer up; a run with any is inconclusive."""
    shares = {
        "emulator": transfer.window.core_share - EMULATOR_LIMIT,
        "machine": transfer.machine_share - MACHINE_LIMIT,
    }
    return [name for name, excess in shares.items() if excess > 0]


def describe(transfer: Transfer, size_bytes: int) -> dict[str, Any]:
    """One transfer for the record; bytes sent are frames on the wire, in units of the object."""
    sent = [count / size_bytes for count in transfer.window.sent_bytes]
    relayed_gb = size_bytes * len(transfer.arrived_s) / 1e9
    workers_cpu = [spent for host, spent in transfer.cpu_s.items() if host != SEED_HOST]
    return {
        "arrived_s": {str(host): round(arrived, 3) for host, arrived in sorted(transfer.arrived_s.items())},
        "seed_sent_objects": round(sent[SEED_HOST], 3),
        "workers_sent_objects": [round(count, 3) for count in sent[1:]],
        "seed_cpu_s": round(transfer.cpu_s.get(SEED_HOST, 0.0), 2),
        "worker_cpu_s_median": round(statistics.median(workers_cpu), 2) if workers_cpu else 0.0,
        "worker_cpu_s_most": round(max(workers_cpu, default=0.0), 2),
        "cpu_s_per_gb_delivered": round(sum(transfer.cpu_s.values()) / relayed_gb, 2),
        "machine_share": round(transfer.machine_share, 3),
        "emulator_core_share": round(transfer.window.core_share, 3),
        "emulator_latest_ms": round(1e3 * transfer.window.latest_s, 1),
        "bursts_lost": transfer.window.lost,
        "bursts_dropped_by_queues": sum(transfer.window.dropped),
        "victim": transfer.victim,
        "limited_by": limits(transfer),
    }


def summarise(
    transfers: Sequence[Transfer], size_bytes: int, share: float, bounds_s: tuple[float, float]
) -> dict[str, Any]:
    """Medians over repeats. bounds_s: of the share, and of all."""
    share_s = statistics.median(time_of_share(t.arrived_s, share) for t in transfers)
    all_s = statistics.median(time_of_share(t.arrived_s, 1.0) for t in transfers)
    runs = [describe(transfer, size_bytes) for transfer in transfers]
    return {
        "share_s": round(share_s, 3),
        "all_s": round(all_s, 3),
        "share_ratio": round(share_s / bounds_s[0], 3),
        "all_ratio": round(all_s / bounds_s[1], 3),
        "inconclusive": any(limits(transfer) for transfer in transfers),
        "runs": runs,
    }

"""What the bench asks of a way to distribute objects, and how one transfer is timed.

Invariant: every scheme is timed by the same code, over the same network, from one clock.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Protocol, Self

from bench.wan.measure import Fault, Transfer
from bench.wan.network import Network
from bench.wan.processes import Processes


class Scheme(Protocol):
    """Context manager: the processes of one scheme, from start to end."""

    processes: Processes

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def prepare(self, nbytes: int) -> None:
        """Everything that happens before the clock starts. Raises Broken."""
        ...

    def distribute(self, until_s: float, fault: Fault | None) -> tuple[dict[int, float], int | None]:
        """Seconds until each worker had the prepared object, and the victim of the fault. Raises Broken."""
        ...

    def details(self) -> dict[str, Any]:
        """What the scheme itself has to say about the last transfer."""
        ...


def time_transfer(
    scheme: Scheme, network: Network, nbytes: int, patience_s: float, fault: Fault | None = None
) -> Transfer:
    """Prepare and distribute one object of ``nbytes``. Raises Broken when it takes longer than ``patience_s``."""
    scheme.prepare(nbytes)
    network.window()
    cpu_before, busy_before = scheme.processes.cpu_s(), _machine_s()
    arrived_s, victim = scheme.distribute(time.monotonic() + patience_s, fault)
    window = network.window()
    cpu_after, busy_after = scheme.processes.cpu_s(), _machine_s()
    busy, total = (after - before for before, after in zip(busy_before, busy_after, strict=True))
    return Transfer(
        arrived_s=arrived_s,
        window=window,
        cpu_s={host: spent - cpu_before[host] for host, spent in cpu_after.items()},
        machine_share=busy / max(total, 1),
        victim=victim,
    )


def _machine_s() -> tuple[float, float]:
    """Seconds that all cores were busy, and that they were there."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    idle = fields[3] + fields[4]
    return (sum(fields) - idle) / os.sysconf("SC_CLK_TCK"), sum(fields) / os.sysconf("SC_CLK_TCK")

"""What runs on every machine rented through SkyPilot, as one order for it.

Invariant: everything is done in the task's command and nothing in its set-up, because SkyPilot keeps, and bills, a
cluster whose set-up failed, while one whose command ended takes itself down.
"""

from __future__ import annotations

import shlex

import msgspec

from echo2.errors import UserError
from echo2.provisioning.pools.skypilot_clusters import Known, cluster_name, labels
from echo2.provisioning.pools.skypilot_market import Rental
from echo2.provisioning.pools.skypilot_sdk import Order


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Raises UserError for values out of range."""

    image: str = ""
    """``docker:`` and a container image, or a machine image of the cloud; empty: SkyPilot's own."""
    install: str = ""
    """Shell commands after which ``echo2`` can be called; empty where the image has it."""
    disk_gb: int = 0
    """Size of the machine's disk in GiB; 0 leaves SkyPilot's default. It holds two snapshots, deltas and the cache."""
    idle_minutes: int = 5
    """A machine whose worker has ended goes down after so long."""

    def __post_init__(self) -> None:
        if not 1 <= self.idle_minutes <= 60:
            raise UserError(f"idle_minutes must be from 1 to 60, got {self.idle_minutes}")
        if self.disk_gb < 0:
            raise UserError(f"disk_gb must be at least 0, got {self.disk_gb}")

    def command(self, machine_id: str) -> str:
        """The task's; the join string is in its environment."""
        worker = f"exec echo2 worker --name {shlex.quote(machine_id)}"
        return "\n".join(("set -e", *filter(None, [self.install.strip()]), worker))


def order(run_id: str, machine_id: str, rental: Rental, plan: WorkerPlan) -> Order:
    return Order(
        cluster=cluster_name(run_id, machine_id),
        machine_id=machine_id,
        infra=rental.infra,
        instance_type=rental.quote.machine,
        accelerator=rental.quote.accelerator,
        accelerators=rental.quote.gpus,
        use_spot=rental.quote.spot,
        image=plan.image,
        disk_gb=plan.disk_gb,
        labels=labels(machine_id, Known(rental.offer.name, rental.quote.usd_per_h)),
        run=plan.command(machine_id),
        idle_minutes=plan.idle_minutes,
    )

"""One look at the pool: what delivers, what is on its way, what it costs.

Invariant: capacity is summed over machines in order of their ids, so that the same pool is the same number.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from echo2.provisioning.budget import Liability, Standing
from echo2.provisioning.market import Open
from echo2.provisioning.observation import Machine, Observation, Phase
from echo2.provisioning.rates import Estimate, pooled, stated
from echo2.provisioning.roster import Roster

SLACK = 1e-9
"""Relative: a target that is missed by the last bits of a double is met."""


class View(msgspec.Struct, frozen=True):
    seen: Observation
    open: Open
    active: dict[str, Machine]
    """Active, heard and not told to go, by id; equation (4) sums over them."""
    pool: Estimate
    """mu_pool."""
    planned: Estimate
    """mu_pool and what was ordered and has not joined."""
    starting: int
    standing: Standing
    expected_per_s: Mapping[str, float]
    """By offer, of one machine."""

    @property
    def sentence(self) -> str:
        """The pool in words."""
        coming = self.planned.mean_per_s - self.pool.mean_per_s
        sure = f"{self.pool.lower_per_s():.3g} to {self.pool.upper_per_s():.3g}"
        told = f"{len(self.active)} active machines deliver {self.pool.mean_per_s:.3g} trajectories/s ({sure})"
        return f"{told} and {self.starting} that start are expected to add {coming:.3g}" if self.starting else told


def view_of(seen: Observation, roster: Roster, offers: Open, expected_per_s: Mapping[str, float]) -> View:
    """``seen`` by the book of ``roster``, which is up to date with it."""
    active = {m.machine_id: m for m in seen.machines if m.machine_id in roster.working}
    coming = [stated(start.expected_per_s) for _, start in sorted(roster.starts.items())]
    pool = pooled(machine.rate for machine in active.values())
    planned = pooled([pool, *coming])
    return View(seen, offers, active, pool, planned, len(coming), _standing(seen, roster), expected_per_s)


def _standing(seen: Observation, roster: Roster) -> Standing:
    gone = (Phase.LOST, Phase.FAILED)
    owed = {m.machine_id: Liability(m.usd_per_h, m.paid_until_s) for m in seen.machines if m.phase not in gone}
    for name, start in roster.starts.items():
        usd_per_h = max(start.usd_per_h, owed[name].usd_per_h) if name in owed else start.usd_per_h
        owed[name] = Liability(usd_per_h, start.paid_until_s)
    machines = tuple(liability for _, liability in sorted(owed.items()))
    return Standing(seen.now_s, seen.spent_usd, seen.learner_usd_per_h, machines)

"""T_bcast: from the end of a step until the share 1/gamma of the pool installed its version.

Invariant: T_bcast is measured on one clock, the coordinator's, and only by confirmed installs (I5). The pool is the
workers that were generating when the step ended and still are, each worth what it delivers: one that joins meanwhile
brings a model and a start-up along, which is not dissemination, and one that hardly delivers keeps nobody waiting.
Where none of them is left, and at the first publish, everybody counts, and the same. For workers that deliver alike it
is the share of workers (paper §3.2).

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from echo2.types import Policy

_TOLERANCE = 1e-9

Holding = Mapping[str, Policy | None]
"""What the active workers have installed, by id."""


class _Publish(NamedTuple):
    started_s: float
    rates_per_s: Mapping[str, float]
    """Of the workers that generated then."""


class Publishing:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._started: dict[Policy, _Publish] = {}
        self._visible: Policy | None = None

    def start(self, policy: Policy, rates_per_s: Mapping[str, float], now: float) -> None:
        """The step that made ``policy`` ended; checkpoint and encoding count as dissemination.

        rates_per_s: what the workers that generate deliver, by id.
        """
        self._started.setdefault(policy, _Publish(now, dict(rates_per_s)))

    def visible(self, policy: Policy, now: float) -> None:
        """Workers can see ``policy``; older publishes that did not complete never will."""
        self._started.setdefault(policy, _Publish(now, {}))
        self._started = {p: publish for p, publish in self._started.items() if p >= policy}
        self._visible = policy

    def installed(self, active: Holding, now: float) -> tuple[Policy, float] | None:
        """Some worker installed, came or went: the publish that just completed, and its T_bcast."""
        policy = self._visible
        if policy is None or policy not in self._started or not active:
            return None
        began = self._started[policy]
        weights = {worker: rate for worker, rate in began.rates_per_s.items() if worker in active}
        if not sum(weights.values()) > 0:
            weights = dict.fromkeys(weights or active, 1.0)
        installed = sum(weight for worker, weight in weights.items() if _holds(active[worker], policy))
        if installed < sum(weights.values()) / self.gamma * (1 - _TOLERANCE):
            return None
        del self._started[policy]
        return policy, now - began.started_s


def _holds(held: Policy | None, policy: Policy) -> bool:
    return held is not None and held >= policy

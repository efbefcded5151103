"""T_bcast: from the end of a step until the share 1/gamma of active workers installed its version.

Invariant: T_bcast is measured on one clock, the coordinator's, and only by confirmed installs (I5). The workers that
count are those that were generating when the step ended and still are: one that joins meanwhile brings a model and a
start-up along, which is not dissemination. Where none of them is left, and at the first publish, everybody counts.

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from echo2.types import Policy

Holding = Mapping[str, Policy | None]


class _Publish(NamedTuple):
    started_s: float
    generating: frozenset[str]


class Publishing:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._started: dict[Policy, _Publish] = {}
        self._visible: Policy | None = None

    def start(self, policy: Policy, active: Holding, now: float) -> None:
        """The step that made ``policy`` ended; checkpoint and encoding count as dissemination.

        active: what the active workers hold, by id; here and below.
        """
        generating = frozenset(worker for worker, held in active.items() if held is not None)
        self._started.setdefault(policy, _Publish(now, generating))

    def visible(self, policy: Policy, now: float) -> None:
        """Workers can see ``policy``; older publishes that did not complete never will."""
        self._started.setdefault(policy, _Publish(now, frozenset()))
        self._started = {p: publish for p, publish in self._started.items() if p >= policy}
        self._visible = policy

    def installed(self, active: Holding, now: float) -> tuple[Policy, float] | None:
        """Some worker installed, came or went: the publish that just completed, and its T_bcast."""
        policy = self._visible
        if policy is None or policy not in self._started or not active:
            return None
        began = self._started[policy]
        counted = [held for worker, held in active.items() if worker in began.generating] or list(active.values())
        holders = sum(held is not None and held >= policy for held in counted)
        if holders < math.ceil(len(counted) / self.gamma - 1e-9):
            return None
        del self._started[policy]
        return policy, now - began.started_s

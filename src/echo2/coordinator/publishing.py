"""T_bcast: from the end of a step until the share 1/gamma of active workers installed its version.

Invariant: T_bcast is measured on one clock, the coordinator's, and only by confirmed installs (I5). Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from echo2.types import Policy


class Publishing:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._started: dict[Policy, float] = {}
        self._visible: Policy | None = None

    def start(self, policy: Policy, now: float) -> None:
        """The step that made ``policy`` ended; checkpoint and encoding count as dissemination."""
        self._started.setdefault(policy, now)

    def visible(self, policy: Policy, now: float) -> None:
        """Workers can see ``policy``; older publishes that did not complete never will."""
        self._started.setdefault(policy, now)
        self._started = {p: start for p, start in self._started.items() if p >= policy}
        self._visible = policy

    def installed(self, running: Mapping[Policy | None, int], now: float) -> tuple[Policy, float] | None:
        """running: how many active workers run which policy. The publish that just completed, and its T_bcast."""
        policy = self._visible
        if policy is None or policy not in self._started or not running:
            return None
        holders = sum(count for version, count in running.items() if version is not None and version >= policy)
        if holders < math.ceil(sum(running.values()) / self.gamma - 1e-9):
            return None
        return policy, now - self._started.pop(policy)

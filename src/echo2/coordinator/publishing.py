"""T_bcast: from the end of a step until the share 1/gamma of the pool installed its version.

Invariant: T_bcast is measured on one clock, the coordinator's, and only by confirmed installs (I5). The pool is the
workers that were generating when the step ended and still are, each worth what it delivers: one that joins meanwhile
brings a model and a start-up along, which is not dissemination, and one that hardly delivers keeps nobody waiting.
Where none of them is left, and at the first publish, everybody counts, and the same. For workers that deliver alike it
is the share of workers (paper §3.2).

Pure; an install costs the same however many workers there are.
"""

from __future__ import annotations

from collections.abc import Mapping

from echo2.types import Policy

_TOLERANCE = 1e-9


class _Publish:
    def __init__(self, started_s: float, rates_per_s: Mapping[str, float]) -> None:
        alike = not sum(rates_per_s.values()) > 0
        self.started_s = started_s
        self.waiting = dict.fromkeys(rates_per_s, 1.0) if alike else dict(rates_per_s)
        """What they deliver, of the workers that have not installed it."""
        self.waiting_per_s = sum(self.waiting.values())
        self.installed_per_s = 0.0
        self.installed = 0

    def installs(self, worker_id: str) -> None:
        if worker_id in self.waiting:
            self.installed += 1
            self.installed_per_s += self._drop(worker_id)

    def loses(self, worker_id: str) -> None:
        if worker_id in self.waiting:
            self._drop(worker_id)

    def _drop(self, worker_id: str) -> float:
        rate = self.waiting.pop(worker_id)
        self.waiting_per_s = self.waiting_per_s - rate if self.waiting else 0.0
        return rate

    def has_arrived(self, gamma: float, running: Mapping[Policy | None, int], policy: Policy) -> bool:
        if self.waiting or self.installed:
            have, all_of = self.installed_per_s, self.installed_per_s + self.waiting_per_s
        else:
            have = sum(count for held, count in running.items() if held is not None and held >= policy)
            all_of = sum(running.values())
        return have > 0 and have >= all_of / gamma * (1 - _TOLERANCE)


class Publishing:
    def __init__(self, gamma: float) -> None:
        self.gamma = gamma
        self._started: dict[Policy, _Publish] = {}
        self._visible: Policy | None = None

    def start(self, policy: Policy, rates_per_s: Mapping[str, float], now: float) -> None:
        """The step that made ``policy`` ended; checkpoint and encoding count as dissemination.

        rates_per_s: what the workers that generate deliver, by id.
        """
        if policy not in self._started:
            self._started[policy] = _Publish(now, rates_per_s)

    def visible(self, policy: Policy, now: float) -> None:
        """Workers can see ``policy``; older publishes that did not complete never will."""
        self.start(policy, {}, now)
        self._started = {p: publish for p, publish in self._started.items() if p >= policy}
        self._visible = policy

    def installs(self, worker_id: str, policy: Policy) -> None:
        for started, publish in self._started.items():
            if policy >= started:
                publish.installs(worker_id)

    def loses(self, worker_id: str) -> None:
        """The worker went away, or was told to."""
        for publish in self._started.values():
            publish.loses(worker_id)

    def arrived(self, running: Mapping[Policy | None, int], now: float) -> tuple[Policy, float] | None:
        """Some worker installed, came or went: the publish that just completed, and its T_bcast.

        running: how many active workers run which policy.
        """
        policy = self._visible
        if policy is None or policy not in self._started:
            return None
        if not self._started[policy].has_arrived(self.gamma, running, policy):
            return None
        return policy, now - self._started.pop(policy).started_s

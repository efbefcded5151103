"""No lease is granted whose trajectory could not be trained within the staleness budget (PROTOCOL §3).

Invariant: the gate is earliest-deadline feasibility. A group of version u must be taken by batch u + D at the latest,
and the batches t .. u + D take P groups each; so among live groups those of version <= u may never be more than
(u + D - t + 1) P. The gate saves work; I1 is guaranteed by ``Buffer.form_batch`` alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec


class GateInputs(msgspec.Struct, frozen=True):
    """What the gate looks at, all in training steps and groups."""

    next_batch: int
    """t: index of the next batch to form."""
    horizon: int
    """D: S while the learner waits, else min(S, equation (12) with the time to finish a group)."""
    groups_per_batch: int
    """P"""
    last_batch: int
    """Index of the run's last batch: nothing is generated for batches after it."""
    live: Mapping[int, int]
    """Live groups (closed, or leased and not overdue) by version."""
    published: Iterable[int]
    """Published versions of the surviving history."""


def horizon(staleness_budget: int, planned: float | None, learner_waits: bool) -> int:
    """D: a waiting learner takes whatever I1 admits; a busy one is kept as fresh as ``planned``.

    planned: equation (12) with the time to finish a group in it. Without it, groups that take several steps would close
    the gate while they run, and the learner would run dry.
    """
    if learner_waits or planned is None:
        return staleness_budget
    return min(staleness_budget, int(planned))


def closed_because(inputs: GateInputs, version: int) -> str | None:
    """Why a lease at ``version`` may not be granted now; None when it may."""
    if inputs.next_batch > inputs.last_batch:
        return "every batch of the run is formed"
    if version < inputs.next_batch - inputs.horizon:
        return (
            f"version {version} is older than batch {inputs.next_batch} minus {inputs.horizon} steps: "
            "a newer snapshot must be installed"
        )
    for bound in inputs.published:
        if bound < version:
            continue
        batches = min(bound + inputs.horizon, inputs.last_batch) - inputs.next_batch + 1
        live = sum(count for live_version, count in inputs.live.items() if live_version <= bound)
        if live >= batches * inputs.groups_per_batch:
            return (
                f"{live} live groups of version {bound} or older fill the {max(batches, 0)} batches "
                "that may still take them: waiting for the learner"
            )
    return None

"""What every simulated run must have kept, whatever befell it; looked at after each, from what the run wrote itself.

Invariant: pure; the first promise that is broken is told with its step and numbers, so that a fault of the programs
ends a simulation instead of colouring its figures.

    I1   no batch holds a trajectory older than S
    I3   the counts add up in every line and never retreat; a step trains on rows that no step has trained on before
         the learner's weights are those of the batches, in order
         steps follow one another, anew from where a rollback went; cost never falls
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from blake3 import blake3

from echo2.errors import Echo2Error
from echo2.metrics import StepMetrics

_GROWING = ("generated", "trained", "expired", "refused", "failed")
_ROUNDING_USD = 1e-9


class BrokenPromise(Echo2Error):
    """A simulated run did what no run may do."""


def check_run(
    metrics: Sequence[StepMetrics], events: Iterable[Mapping[str, Any]], weights: str, staleness_budget: int
) -> None:
    """Raises BrokenPromise.

    metrics: every line, in the order of writing.  weights: the hash chain of the durable weights (``ModelledLearner``).
    """
    for sentence in (*_lines(metrics, staleness_budget), *_order(metrics), *_rows(metrics), *_weights(events, weights)):
        raise BrokenPromise(f"{sentence}: a fault of the programs, or of the simulator, and no result")


def _lines(metrics: Sequence[StepMetrics], staleness_budget: int) -> Iterator[str]:
    for line in metrics:
        ages = [int(age) for age in line.staleness_histogram]
        oldest = max(ages, default=line.staleness_max)
        if oldest > staleness_budget or line.staleness_max != oldest:
            yield (
                f"I1: no batch may hold a trajectory older than S = {staleness_budget} steps, and the batch of step "
                f"{line.step} holds one of {max(oldest, line.staleness_max)}"
            )
        if min(ages, default=0) < 0:
            yield f"I2: no batch may hold a trajectory of a later version, and that of step {line.step} does"
        states = (line.trained, line.expired, line.refused, line.buffered, line.failed)
        if line.generated != sum(states):
            yield (
                f"I3: generated must be trained + expired + refused + buffered + failed, got {line.generated} = "
                f"{' + '.join(map(str, states))} in step {line.step}"
            )


def _order(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    """From line to line."""
    if metrics and metrics[0].step:
        yield f"I3: the first line must be of step 0, got {metrics[0].step}"
    for before, after in pairwise(metrics):
        rolled_back = after.policy_incarnation > before.policy_incarnation and after.step <= before.step
        if after.step != before.step + 1 and not rolled_back:
            yield f"I3: step {before.step} must be followed by step {before.step + 1}, got {after.step}"
        for name in _GROWING:
            if getattr(after, name) < getattr(before, name):
                yield f"I3: {name} must never fall, got {getattr(before, name)}, then {getattr(after, name)}"
        if after.cost_usd < before.cost_usd - _ROUNDING_USD:
            yield f"cost_usd must never fall, got {before.cost_usd} in step {before.step}, then {after.cost_usd}"


def _rows(metrics: Sequence[StepMetrics]) -> Iterator[str]:
    """A row counts as trained once: a batch of rows that were trained before counts fewer than it holds."""
    trained, steps = 0, 0
    for line in metrics:
        rows = sum(line.staleness_histogram.values())
        if line.step >= steps and line.trained - trained != rows:
            yield (
                f"I3: a row must be trained once, and step {line.step} trained on {rows} rows of which "
                f"{line.trained - trained} had not been trained on"
            )
        trained, steps = line.trained, max(steps, line.step + 1)


def _weights(events: Iterable[Mapping[str, Any]], weights: str) -> Iterator[str]:
    """What was trained on, replays after crashes included."""
    digests: dict[int, str] = {}
    for event in events:
        if event["kind"] == "batch":
            digests[event["step"]] = event["digest"]  # a batch that never became durable is formed again
    chain, known = "initial", {"initial"}
    for step in sorted(digests):
        chain = blake3(f"{chain}/{digests[step]}".encode()).hexdigest()
        known.add(chain)
    if weights not in known:
        yield "I3: the learner's weights must be those of the batches in their order, and they are not"

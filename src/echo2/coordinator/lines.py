"""What the run writes for people, after it is durable.

Invariant: a line is shown only after the commit that holds it. The store is the record; files that lag behind it after
a crash are brought up to date when the coordinator starts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from echo2.coordinator.operations import EvalPut, Loaded, MetricsPut, Operation
from echo2.metrics import StepMetrics


class Lines(Protocol):
    """Must not block; called on the event loop."""

    def show(self, operations: Sequence[Operation]) -> None:
        """Metrics and evaluations among ``operations`` are durable now."""
        ...

    def transcribe(self, step: int, records: Sequence[bytes]) -> None:
        """Records of a few trajectories that batch ``step`` trained on."""
        ...


def newest(loaded: Loaded) -> StepMetrics | None:
    """The last metrics line of an earlier life."""
    return msgspec.json.decode(loaded.metrics[-1], type=StepMetrics) if loaded.metrics else None


class CollectedLines:
    """Lines kept in memory: for simulated runs."""

    def __init__(self) -> None:
        self.metrics: list[StepMetrics] = []
        self.evals: list[bytes] = []
        self.transcripts: list[tuple[int, bytes]] = []

    def show(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, MetricsPut):
                self.metrics.append(msgspec.json.decode(operation.line, type=StepMetrics))
            elif isinstance(operation, EvalPut):
                self.evals.append(operation.line)

    def transcribe(self, step: int, records: Sequence[bytes]) -> None:
        self.transcripts.extend((step, record) for record in records)

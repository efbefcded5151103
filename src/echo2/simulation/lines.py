"""Metrics lines of a simulated run, for those who wait for a step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from echo2.coordinator.lines import CollectedLines
from echo2.coordinator.operations import Operation
from echo2.metrics import StepMetrics

OnStep = Callable[[StepMetrics], None]


class WatchedLines(CollectedLines):
    def __init__(self, on_step: OnStep | None = None) -> None:
        super().__init__()
        self._on_step = on_step
        self._waiting: list[tuple[int, asyncio.Event]] = []

    def show(self, operations: Sequence[Operation]) -> None:
        before = len(self.metrics)
        super().show(operations)
        for line in self.metrics[before:]:
            if self._on_step is not None:
                self._on_step(line)
        for step, event in self._waiting:
            if self.steps >= step:
                event.set()

    @property
    def steps(self) -> int:
        """Trained so far; fewer than lines after a rollback."""
        return self.metrics[-1].step + 1 if self.metrics else 0

    async def reached(self, step: int) -> None:
        """Returns when so many steps are trained."""
        event = asyncio.Event()
        if self.steps < step:
            self._waiting.append((step, event))
            await event.wait()

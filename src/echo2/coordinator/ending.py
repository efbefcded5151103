"""How a run ends in order.

Invariant: stop ─▶ the learner publishes its last version and leaves ─▶ a running evaluation of it is finished ─▶
workers drain ─▶ done; each stage has its own deadline, so that an end cannot hang on somebody who died.

Pure: time enters as a number.
"""

from __future__ import annotations

from echo2.coordinator.books import Books

FINISH_S = 300.0
"""Longest wait, after the last step, for the learner to publish its last version and leave, and for its evaluation."""
DRAIN_S = 60.0
"""Longest wait, at the end of a run, for workers to submit what they hold and leave."""


class Ending:
    def __init__(self, books: Books) -> None:
        self.books = books
        self._since: float | None = None

    def advance(self, now: float) -> bool:
        """Go on to the next stage when this one is over; whether the run is done."""
        books = self.books
        if not books.stop_reason:
            return False
        if self._since is None:
            self._since = now
        waited = now - self._since
        if not books.draining:
            if waited > FINISH_S or not (self._learner_owes() or self._evaluation_runs()):
                books.draining = True
                self._since = now
                books.events.emit("draining", reason=books.stop_reason)
            return False
        if books.fleet.active_count and waited <= DRAIN_S:
            return False
        books.state.finished = books.all_steps_reported
        books.events.emit("done", steps=books.state.steps_reported, reason=books.stop_reason)
        return True

    def _learner_owes(self) -> bool:
        """The learner is still at it, or died between its last step and the publish of the last version."""
        books = self.books
        last = books.state.current.version if books.state.current else -1
        unpublished = books.all_steps_reported and last < books.state.steps_reported
        return books.learner_attached or (not books.learner_left and unpublished)

    def _evaluation_runs(self) -> bool:
        """Of a run that did all its steps; one that was stopped early does not wait for numbers."""
        return (
            self.books.all_steps_reported and self.books.evaluation is not None and bool(self.books.fleet.active_count)
        )

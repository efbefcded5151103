"""Train from Python: ``echo2.train(config)``, or ``echo2.Run`` to watch and steer.

    with echo2.Run("run.toml") as run:
        for metrics in run:
            if metrics.reward_mean > 0.9:
                run.stop("good enough")
    print(run.result().reward_mean)

Invariant: whatever happens inside the ``with`` block, no process of the run is left when it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from echo2.config.load import build_config, load_config
from echo2.config.root import Config
from echo2.errors import UserError
from echo2.metrics import StepMetrics
from echo2.ports import EventLog
from echo2.run.folder import RunFolder
from echo2.run.launch import Launch, RunEnded, specs_of
from echo2.run.metrics_tail import MetricsTail
from echo2.run.operator import OperatorLine
from echo2.shell import ConsoleEvents
from echo2.transport.messages import RunStatus

T = TypeVar("T")

LOOK_S = 0.2
"""Time between two looks at the metrics file."""
LAST_STEPS = 5


class RunResult(msgspec.Struct, frozen=True):
    folder: Path
    metrics: tuple[StepMetrics, ...]
    """One line per training step, those before a resume included."""
    stopped: str
    """Why the run stopped before its last step; empty when it did not."""

    @property
    def reward_mean(self) -> float:
        """Mean reward over the last steps; nan before the first step."""
        last = self.metrics[-LAST_STEPS:]
        return sum(line.reward_mean for line in last) / len(last) if last else float("nan")


def as_config(config: Config | Mapping[str, Any] | str | Path) -> Config:
    """A ready configuration, tables as a TOML file would hold them, or the path of one. Raises ConfigError."""
    if isinstance(config, Config):
        return config
    if isinstance(config, Mapping):
        return build_config(config)
    return load_config(Path(config))


def train(
    config: Config | Mapping[str, Any] | str | Path, *, resume: bool = False, events: EventLog | None = None
) -> RunResult:
    """Run all programs on this machine to the end.

    Raises ConfigError or UserError for input that is wrong, Echo2Error when the run cannot go on.
    """
    with Run(config, resume=resume, events=events) as run:
        return run.result()


class Run:
    """A run on this machine, from another thread: start it, iterate its steps, look at it, stop it."""

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path,
        *,
        resume: bool = False,
        events: EventLog | None = None,
    ) -> None:
        self.config = as_config(config)
        self.folder = RunFolder.of(self.config)
        self.metrics: list[StepMetrics] = []
        """Lines seen so far, by iterating or by ``result``."""
        self._resume = resume
        self._events = events or ConsoleEvents("echo2")
        self._tail = MetricsTail(self.folder.metrics)
        self._operator = OperatorLine(self.folder)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._launch: Launch | None = None
        self._sigterm_before: Any = None
        """Inside ``with``, SIGTERM interrupts like Ctrl-C, so that the run ends in order."""
        self._ended: Future[RunEnded] = Future()
        self._thread = threading.Thread(target=self._live, name="echo2 run", daemon=True)

    # ---- life --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Prepare the folder and start the programs. Raises UserError when the folder cannot be used."""
        self.folder.prepare(self.config, resume=self._resume)
        self.metrics += self._tail.new_lines()  # Of an earlier life: part of the result, not news.
        self._launch = Launch(specs_of(self.config, self.folder), self.folder, self._events, self._operator.stop)
        self._loop = asyncio.new_event_loop()
        self._thread.start()

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._sigterm_before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ended.done():
            self.stop("the caller left" if error is None else f"the caller failed: {kind.__name__ if kind else ''}")
        try:
            self._thread.join()
        except KeyboardInterrupt:
            self.stop("interrupted again")
            self._thread.join()
        finally:
            if self._sigterm_before is not None:
                signal.signal(signal.SIGTERM, self._sigterm_before)

    def _live(self) -> None:
        loop, launch = self._loop, self._launch
        assert loop is not None, "start() made it"
        assert launch is not None, "start() made it"
        asyncio.set_event_loop(loop)
        try:
            ended = loop.run_until_complete(self._main(launch))
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(ended)
        finally:
            loop.close()

    async def _main(self, launch: Launch) -> RunEnded:
        try:
            return await launch.run()
        finally:
            await self._operator.close()

    # ---- looking -----------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        return self._ended.done()

    def __iter__(self) -> Iterator[StepMetrics]:
        """Lines of metrics as they come; ends with the run. Raises what ended it, when that is an error."""
        while True:
            over = self.is_over
            yield from self.new_metrics()
            if over:
                self._ended.result()
                return
            time.sleep(LOOK_S)

    def new_metrics(self) -> list[StepMetrics]:
        """Lines that appeared since the last look; does not wait."""
        lines = self._tail.new_lines()
        self.metrics += lines
        return lines

    def status(self) -> RunStatus:
        """A live picture from the coordinator. Raises TransportError while it cannot be reached."""
        return self._ask(self._operator.status())

    def join_string(self) -> str:
        """What ``echo2 worker`` needs on another machine; empty until the coordinator listens."""
        try:
            return self.folder.join("worker").read_text().strip()
        except FileNotFoundError:
            return ""

    # ---- steering ----------------------------------------------------------------------------------------------

    def stop(self, reason: str = "stopped from Python") -> None:
        """Ask for an orderly end and return; a second call does not wait for order. ``result`` waits."""
        loop, launch = self._loop, self._launch
        if loop is not None and launch is not None and not self.is_over:
            with contextlib.suppress(RuntimeError):  # it ended in this very moment
                loop.call_soon_threadsafe(launch.stop, reason)

    def result(self) -> RunResult:
        """Wait for the end. Raises what ended the run, when that is an error."""
        for _ in self:
            pass
        return RunResult(self.folder.root, tuple(self.metrics), self._ended.result().reason)

    def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        if self._loop is None or self.is_over:
            question.close()
            raise UserError("the run must be running for that; start it, or read its folder")
        return asyncio.run_coroutine_threadsafe(question, self._loop).result()

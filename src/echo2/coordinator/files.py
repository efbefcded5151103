"""The run folder's files for people, written beside the event loop.

Invariant: nothing here is needed for correctness. Lines go through one thread, in order; a full disk loses lines for
people, is said once, and never stops the run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from echo2.config.root import Config
from echo2.coordinator.evaluation import EvalLine
from echo2.coordinator.operations import EvalPut, Loaded, MetricsPut, Operation
from echo2.metrics import StepMetrics
from echo2.ports import EventLog
from echo2.report.sinks import JsonLines, open_sinks
from echo2.report.transcripts import transcript
from echo2.types import Trajectory

Decode = Callable[[Sequence[int]], str]


class FileEvents:
    """``events.jsonl``: buffered, so that an event costs no disk wait; flushed when the run ends or a second passed."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=1 << 16)
        self._flushed = time.monotonic()

    def emit(self, kind: str, **fields: Any) -> None:
        line = {"wall_time": time.time(), "kind": kind, **fields}
        try:
            self._file.write(msgspec.json.encode(line) + b"\n")
            if time.monotonic() - self._flushed > 1.0:
                self._flushed = time.monotonic()
                self._file.flush()
        except OSError as error:
            print(f"coordinator: an event could not be written: {error}", file=sys.stderr)

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # It would hide why the run ended.
            print(f"coordinator: the last events could not be written: {error}", file=sys.stderr)


class FileLines:
    """``metrics.jsonl`` with its sinks, ``evals.jsonl`` and ``transcripts.jsonl``."""

    def __init__(self, root: Path, config: Config, run_id: str, loaded: Loaded, events: EventLog) -> None:
        self._events = events
        self._root = root
        self._sinks = open_sinks(
            run_dir=root,
            run_id=run_id,
            run_name=config.run.name,
            tensorboard=config.metrics.tensorboard,
            wandb_project=config.metrics.wandb_project,
            config=config.model_dump(mode="json"),
            report=lambda problem: events.emit("sink_failed", problem=problem),
        )
        self._evals = JsonLines(root / "evals.jsonl")
        self._transcripts = JsonLines(root / "transcripts.jsonl")
        self._decode: Decode | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lines")
        self._thread.submit(self._catch_up, loaded)

    def show(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if isinstance(operation, MetricsPut):
                self._submit(self._write_metrics, operation.line)
            elif isinstance(operation, EvalPut):
                self._submit(self._write_eval, operation.line)

    def transcribe(self, step: int, records: Sequence[bytes]) -> None:
        if records:
            self._submit(self._write_transcripts, step, tuple(records))

    def close(self) -> None:
        self._thread.shutdown(wait=True)
        for sink in self._sinks:
            sink.close()
        self._evals.close()
        self._transcripts.close()

    def _submit(self, work: Callable[..., None], *arguments: Any) -> None:
        def guarded() -> None:
            try:
                work(*arguments)
            except OSError as error:
                self._events.emit("line_lost", problem=str(error))
                print(f"coordinator: a line could not be written: {error}", file=sys.stderr)

        self._thread.submit(guarded)

    def _catch_up(self, loaded: Loaded) -> None:
        """Lines that were durable but not shown when an earlier life ended; sinks skip what they have."""
        for line in loaded.metrics:
            self._sinks[0].write(msgspec.json.decode(line, type=StepMetrics))
        newest = -1
        if self._evals.last_line:
            newest = msgspec.json.decode(self._evals.last_line, type=EvalLine).step
        for line in loaded.evals:
            if msgspec.json.decode(line, type=EvalLine).step > newest:
                self._evals.append(msgspec.Raw(line))

    def _write_metrics(self, line: bytes) -> None:
        metrics = msgspec.json.decode(line, type=StepMetrics)
        for sink in self._sinks:
            sink.write(metrics)

    def _write_eval(self, line: bytes) -> None:
        self._evals.append(msgspec.Raw(line))

    def _write_transcripts(self, step: int, records: Sequence[bytes]) -> None:
        decode = self._decode = self._decode or open_decoder(self._root / "assets" / "tokenizer.json")
        for record in records:
            trajectory = msgspec.msgpack.decode(record, type=Trajectory)
            self._transcripts.append(transcript(trajectory, step, decode))


def open_decoder(tokenizer: Path) -> Decode:
    """Token ids to text, with the run's tokenizer where there is one; else the ids themselves."""
    if tokenizer.exists():
        try:
            from tokenizers import Tokenizer
        except ImportError:
            pass
        else:
            loaded = Tokenizer.from_file(str(tokenizer))
            return lambda token_ids: str(loaded.decode(list(token_ids), skip_special_tokens=False))
    return lambda token_ids: " ".join(map(str, token_ids))

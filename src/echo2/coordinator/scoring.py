"""The scoring process, as the coordinator holds it.

Invariant: a score, or NoScore, within ``START_S`` + ``SCORE_S`` and a pause: a process that hangs is killed, and the
next reply gets a new one, after a pause that grows with each failure in a row. It is started by the first reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec

from echo2.coordinator.rescoring import NoScore
from echo2.coordinator.scorer import (
    SCORE_S,
    Answer,
    Ask,
    Broken,
    Failed,
    Ready,
    Told,
)
from echo2.data.frames import LENGTH_BYTES, MAX_FRAME_BYTES, packed
from echo2.data.task import Score
from echo2.types import Prompt

START_S = 180.0
"""For the tokenizer and the tasks to be loaded, on a machine that has other work."""
GRACE_S = 5.0
"""The process ends itself when its time for a reply is over; after so long more it is ended."""
FIRST_PAUSE_S, MOST_PAUSE_S = 1.0, 300.0

_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class ScoringProcess:
    """Implements ``rescoring.Scorer``. Use as a context: leaving ends the process. Asked one reply at a time."""

    def __init__(
        self,
        root: Path,
        program: Sequence[str] = (sys.executable, "-m", "echo2.coordinator.scorer"),
        start_s: float = START_S,
        score_s: float = SCORE_S + GRACE_S,
        first_pause_s: float = FIRST_PAUSE_S,
    ) -> None:
        """root: the run folder."""
        self._command = (*program, str(root))
        self._start_s, self._score_s, self._first_pause_s = start_s, score_s, first_pause_s
        self._process: Process | None = None
        self._failures = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._end()

    async def score(self, prompt: Prompt, reply: bytes) -> Score:
        try:
            asked = packed(Ask(prompt, reply))
        except ValueError as error:
            raise NoScore(str(error)) from error
        process = self._process or await self._begin()
        try:
            assert process.stdin is not None, "made with a pipe"
            process.stdin.write(asked)
            answer = await self._hear(process, self._score_s, "no score")
        except BaseException:
            await self._end()
            raise
        self._failures = 0
        if isinstance(answer, Told):
            return Score(answer.reward, answer.status)
        raise NoScore(answer.reason if isinstance(answer, Failed) else f"no score but {type(answer).__name__}")

    async def _begin(self) -> Process:
        if self._failures:
            await asyncio.sleep(min(self._first_pause_s * 2.0 ** min(self._failures - 1, 30), MOST_PAUSE_S))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        try:
            process = await asyncio.create_subprocess_exec(
                *self._command, stdin=PIPE, stdout=PIPE, env=environment,
                start_new_session=True,  # Ctrl-C is for the coordinator
            )  # fmt: skip
        except OSError as error:
            self._failures += 1
            raise NoScore(f"the scoring process could not be started: {error}") from error
        self._process = process
        try:
            answer = await self._hear(process, self._start_s, "the scoring process did not start")
        except BaseException:
            await self._end()
            raise
        if isinstance(answer, Ready):
            return process
        await self._end()
        reason = answer.reason if isinstance(answer, Broken) else type(answer).__name__
        raise NoScore(f"replies cannot be scored on the coordinator's machine: {reason}", for_good=True)

    async def _hear(self, process: Process, limit_s: float, what: str) -> Answer:
        """Raises NoScore when nothing comes within ``limit_s``, and when the process ended."""
        assert process.stdout is not None, "made with a pipe"
        try:
            async with asyncio.timeout(limit_s):
                length = int.from_bytes(await process.stdout.readexactly(LENGTH_BYTES), "big")
                if length > MAX_FRAME_BYTES:
                    raise NoScore(f"{what}: the scoring process wrote something else")
                return _answers.decode(await process.stdout.readexactly(length))
        except TimeoutError:
            reason = f"{what} within {limit_s:g} s"
        except (asyncio.IncompleteReadError, OSError):
            reason = f"{what}: the scoring process ended"
        except msgspec.MsgspecError:
            reason = f"{what}: the scoring process wrote something else"
        raise NoScore(reason)

    async def _end(self) -> None:
        self._failures += 1
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        assert process.stdin is not None, "made with a pipe"
        assert process.stdout is not None, "made with a pipe"
        process.stdin.close()
        await process.stdout.read()
        await process.wait()

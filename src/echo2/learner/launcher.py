"""The ranks of a learner on one machine, as ``learning.ranks`` says: what torchrun does for several machines.

Invariant: the ranks live and die together. When one ends before its time, the others are ended at once and the first
one's sentence and exit code are the learner's; when this process dies, so do they (their life line).

Each rank meets the others over the loopback interface alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence

from echo2.errors import Echo2Error, UserError
from echo2.run.child import environment

LEAVE_LIMIT_S = 30.0
"""For the other ranks to leave after rank 0 left in order."""


LONGEST_LINE_BYTES = 1 << 24
"""Progress bars rewrite one line for hours."""


class RankProcesses:
    """Processes of this machine, one per rank."""

    def __init__(self, command: Sequence[str], count: int, threads: int) -> None:
        """command: of each rank, which is told who it is by its environment.  threads: of each; 0: its share."""
        self._command = tuple(command)
        self._count = count
        self._threads = threads or max(1, (os.cpu_count() or 1) // count)
        self._processes: list[Process] = []
        self._sentences: dict[int, str] = {}
        self._stopped = False

    def stop(self, _: str) -> None:
        """Rank 0 ends after the running step and tells the others."""
        self._stopped = True
        if self._processes and self._processes[0].returncode is None:
            self._processes[0].send_signal(signal.SIGTERM)

    async def run(self) -> int:
        """The exit code of rank 0 when all leave in order. Raises UserError, Echo2Error when another failed first."""
        try:
            async with asyncio.TaskGroup() as group:
                for rank, spec in enumerate(environments(self._count, self._threads)):
                    process = await self._start(rank, spec)
                    self._processes.append(process)
                    if rank:
                        group.create_task(self._pass_on(rank, process), name=f"words of rank {rank}")
                failed = await self._first_failure()
                await self._end_all()
        finally:
            await self._end_all()
        return self._verdict(failed)

    async def _start(self, rank: int, spec: Mapping[str, str]) -> Process:
        words = None if rank == 0 else PIPE
        return await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=words, stderr=None if rank == 0 else asyncio.subprocess.STDOUT,
            env=dict(spec), start_new_session=True, limit=LONGEST_LINE_BYTES,
        )  # fmt: skip

    async def _pass_on(self, rank: int, process: Process) -> None:
        """What a rank says, under its number: only rank 0's words are the learner's own."""
        assert process.stdout is not None, "it was started with a pipe"
        async for line in process.stdout:
            text = line.decode(errors="replace").rstrip()
            if text.startswith("echo2:"):
                self._sentences[rank] = text.removeprefix("echo2:").strip()
            print(f"[rank {rank}] {text}", file=sys.stderr, flush=True)

    async def _first_failure(self) -> int | None:
        """The rank that ended first with something wrong; None when all left in order."""
        waits = {asyncio.ensure_future(process.wait()): rank for rank, process in enumerate(self._processes)}
        patience: float | None = None
        while waits:
            done, _ = await asyncio.wait(waits, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break  # rank 0 left in order and somebody did not hear
            # Who was killed is the cause; those who only noticed have an exit code of their own.
            ended = sorted((task.result(), waits.pop(task)) for task in done)
            if wrong := [rank for code, rank in ended if code]:
                return wrong[0]
            patience = LEAVE_LIMIT_S
        return None

    async def _end_all(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
        for process in self._processes:
            await process.wait()

    def _verdict(self, failed: int | None) -> int:
        if failed is None or (self._stopped and self._processes[0].returncode == 0):
            return 0  # who is stopped while it opens leaves the others without a word
        code = self._processes[failed].returncode or 0
        if failed == 0 and code > 0:
            return code  # it has said why
        why = self._sentences.get(failed) or (f"killed by signal {-code}" if code < 0 else f"exit code {code}")
        raise (UserError(why) if code == 2 else Echo2Error(f"rank {failed} of the learner ended: {why}"))


def environments(count: int, threads: int) -> list[dict[str, str]]:
    shared = environment(os.environ, threads) | {
        "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }  # fmt: skip
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = shared["NCCL_SOCKET_IFNAME"] = "lo"
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

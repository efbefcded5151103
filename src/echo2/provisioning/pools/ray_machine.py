"""A machine of the ray pool, as an actor on the node where Ray placed it: one worker, started, watched and ended.

Invariant: the actor is there while its worker is, and not longer. When the worker ends, for whatever reason, the actor
tells those who wait, removes what the worker kept, and leaves the cluster, whether or not anybody still listens: so its
resources are free again after the coordinator is gone. When the actor dies, its worker's life line closes and the
worker ends. When what started the actor is gone, so is the node for everybody else, and the worker is ended: Ray leaves
an actor running whose node stood still and was given up meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import msgspec

from echo2.provisioning.pools.ray_messages import Duty
from echo2.shell import LIFELINE_VARIABLE
from echo2.transport.join import ENVIRONMENT_KEY

WORKER = ("-m", "echo2", "worker")
LAST_WORD_S = 1.0
"""Between saying that the worker ended and leaving: time for the words to arrive."""
FORCED_S = 5.0
"""A killed worker is gone within this."""
LEAVE_S = 10.0
"""Ray ends an actor that asks for it within this, or the actor ends itself."""
NODE_LOOK_S = 1.0
NODE_LEAVE_S = 20.0
"""For the worker of a node that is gone, to submit what it holds."""
_LOG = "worker.log"
_TAIL_BYTES = 4096
_WORD_CHARACTERS = 300


class About(msgspec.Struct, frozen=True):
    usd_per_h: float
    age_s: float
    node_id: str


class Ended(msgspec.Struct, frozen=True):
    never_worked: bool
    """It could not be started, or its input was wrong (exit code 2): another like it would end the same."""
    why: str


def this_node() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def leave_cluster() -> None:
    """End this actor and free what it holds."""
    import ray

    threading.Timer(LEAVE_S, os._exit, (0,)).start()  # whatever Ray has against it, the process goes
    ray.kill(ray.get_runtime_context().current_actor)


class RayMachine:
    def __init__(
        self, duty: Duty, where: Callable[[], str] = this_node, leave: Callable[[], None] = leave_cluster
    ) -> None:
        """Starts the worker. Never raises: what went wrong is what ``ended`` says."""
        self._usd_per_h = duty.usd_per_h
        self._where = where
        self._leave = leave
        self._began_s = time.monotonic()
        self._folder = Path(duty.folder).expanduser() / duty.machine_id
        self._ended: Future[Ended] = Future()
        self._tidied: Future[None] = Future()
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start(duty)
        except OSError as error:
            self._ended.set_result(Ended(True, f"its worker could not be started: {error}"))
        threading.Thread(target=self._watch, name="worker", daemon=True).start()
        threading.Thread(target=self._watch_node, args=(os.getppid(),), name="node", daemon=True).start()

    async def about(self) -> About:
        return About(self._usd_per_h, time.monotonic() - self._began_s, self._where())

    async def ended(self) -> Ended:
        """Returns when the worker has ended."""
        return await asyncio.shield(asyncio.wrap_future(self._ended))

    async def stop(self, patience_s: float) -> None:
        """Ask the worker to leave, make it after ``patience_s``; returns once it is gone, and what it kept removed."""
        if self._process is not None:
            self._process.terminate()
        try:
            async with asyncio.timeout(patience_s):
                await self.ended()
        except TimeoutError:
            self._kill()
        async with asyncio.timeout(FORCED_S):
            await asyncio.shield(asyncio.wrap_future(self._tidied))

    def _start(self, duty: Duty) -> subprocess.Popen[bytes]:
        self._folder.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            LIFELINE_VARIABLE: "1",
            ENVIRONMENT_KEY: duty.join,  # not an argument, which every user of the node could read
            "PYTHONUNBUFFERED": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        command = [sys.executable, *duty.program, "--name", duty.machine_id, "--dir", str(self._folder)]
        with (self._folder / _LOG).open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _watch(self) -> None:
        """In a thread of its own."""
        if self._process is not None:
            code = self._process.wait()
            assert self._process.stdin is not None, "made with a pipe"
            self._process.stdin.close()
            self._ended.set_result(self._told(code))
        self._tidy()
        self._tidied.set_result(None)
        time.sleep(LAST_WORD_S)
        self._leave()

    def _watch_node(self, parent: int) -> None:
        """In a thread of its own. ``parent``: the process that started this one, for as long as it is there."""
        while os.getppid() == parent:
            if self._tidied.done():
                return
            time.sleep(NODE_LOOK_S)
        if self._process is not None:
            self._process.terminate()
        try:
            self._ended.result(NODE_LEAVE_S)
        except TimeoutError:
            self._kill()

    def _told(self, code: int) -> Ended:
        if code < 0:
            return Ended(False, f"its worker was ended by signal {-code}")
        words = self._last_words()
        return Ended(code == 2, f"its worker ended with exit code {code}{': ' if words else ''}{words}")

    def _last_words(self) -> str:
        """The sentence that the worker ended with, or the last line it wrote."""
        try:
            with (self._folder / _LOG).open("rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = [line.strip() for line in log.read().decode(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        sentences = [line.removeprefix("echo2:").strip() for line in lines if line.startswith("echo2:")]
        return (sentences or lines or [""])[-1][:_WORD_CHARACTERS]

    def _tidy(self) -> None:
        """Its id never comes back, so nobody will need its snapshots; the log stays for people."""
        with contextlib.suppress(OSError):
            for path in self._folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != _LOG:
                    path.unlink()

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

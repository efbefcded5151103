"""Processes on the hosts of a network, and one reader of all their pipes.

Invariant: every message of every process is stamped by one clock, when it is read; a process that ends before it was
told to is an error with the end of its log. Messages are 4 bytes of length (network order) and a body, both ways.
"""

from __future__ import annotations

import os
import selectors
import struct
import subprocess
import sys
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.wan.network import Network

ROOT = Path(__file__).resolve().parents[2]
_LENGTH = struct.Struct("!I")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Broken(Exception):
    """A process ended or fell silent; the message has the end of its log."""


@dataclass(frozen=True)
class Message:
    host: int
    body: bytes
    read_s: float
    """On the monotonic clock."""


class Processes:
    """Context manager; at most one process per host, started with the module's name."""

    def __init__(self, network: Network, name: str) -> None:
        self._network = network
        self._folder = network.folder / name
        self._started: dict[int, subprocess.Popen[bytes]] = {}
        self._partial: dict[int, bytearray] = {}
        self._read: deque[Message] = deque()
        self._selector = selectors.DefaultSelector()
        self._stopped: set[int] = set()

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with ExitStack() as stack:
            stack.callback(self._selector.close)
            for process in self._started.values():
                stack.enter_context(process)  # waits, and closes the pipes
                stack.callback(process.kill)

    def folder(self, host: int) -> Path:
        """Where the process of this host may keep files; in memory."""
        folder = self._folder / str(host)
        folder.mkdir(exist_ok=True)
        return folder

    def start(self, host: int, module: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}"}
        command = self._network.command(host, sys.executable, "-m", module)
        with self._log(host).open("wb") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=ROOT
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._started[host] = process
        self._partial[host] = bytearray()
        self._selector.register(process.stdout, selectors.EVENT_READ, host)

    def send(self, host: int, body: bytes) -> None:
        stream = self._started[host].stdin
        assert stream is not None
        stream.write(_LENGTH.pack(len(body)) + body)
        stream.flush()

    def read(self, until_s: float) -> Message | None:
        """The next message; None when the clock reaches ``until_s``. Raises Broken."""
        while not self._read:
            patience_s = until_s - time.monotonic()
            if patience_s <= 0:
                return None
            ready = self._selector.select(patience_s)
            now_s = time.monotonic()
            for key, _ in ready:
                self._take_in(key.data, key.fd, now_s)
        return self._read.popleft()

    def signal(self, host: int, number: int) -> None:
        """Kill or freeze; the process may end from now on."""
        self._stopped.add(host)
        self._started[host].send_signal(number)

    def cpu_s(self) -> dict[int, float]:
        """CPU seconds, user and system, of each live process so far."""
        spent = {}
        for host, process in self._started.items():
            if host not in self._stopped:
                fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
                spent[host] = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
        return spent

    def _log(self, host: int) -> Path:
        return self._folder / f"{host}.log"

    def _take_in(self, host: int, descriptor: int, now_s: float) -> None:
        data = os.read(descriptor, 1 << 16)
        if not data:
            self._selector.unregister(descriptor)
            if host not in self._stopped:
                code = self._started[host].wait()
                raise Broken(f"the process on host {host} ended with {code}: {self._log(host).read_text()[-2000:]}")
        partial = self._partial[host]
        partial += data
        while len(partial) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(partial)[0]
            if len(partial) < end:
                break
            self._read.append(Message(host, bytes(partial[_LENGTH.size : end]), now_s))
            del partial[:end]

"""The baseline: libtorrent in a full mesh of explicit peers.

Invariant: only the transfer is timed. Pieces are hashed, metadata is everywhere and every session listens before the
clock starts; it starts just before the sessions are told to connect.
"""

from __future__ import annotations

import signal
import time
from types import TracebackType
from typing import Any, Self

import msgspec
from bench.wan.measure import FAULT_AT, SEED_HOST, Fault
from bench.wan.network import Network
from bench.wan.objects import write_random
from bench.wan.processes import Broken, Processes
from bench.wan.torrent_node import make_torrent

_START_S = 30.0


class Torrent:
    """Context manager; see ``scheme.Scheme``."""

    def __init__(self, network: Network, workers: int) -> None:
        self._network = network
        self._workers = range(1, workers + 1)
        self.processes = Processes(network, "libtorrent")
        self._number = 0

    def __enter__(self) -> Self:
        self.processes.__enter__()
        for host in (SEED_HOST, *self._workers):
            self.processes.start(host, "bench.wan.torrent_node")
            self._send(host, {"type": "listen", "address": self._network.address(host)})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.processes.__exit__(kind, error, trace)

    def prepare(self, nbytes: int) -> None:
        if self._number:
            for host in (SEED_HOST, *self._workers):
                self._send(host, {"type": "forget"})
                (self.processes.folder(host) / str(self._number)).unlink()
        self._number += 1
        path = self.processes.folder(SEED_HOST) / str(self._number)
        write_random(path, nbytes, self._number)
        torrent = make_torrent(str(path))
        for host in (SEED_HOST, *self._workers):
            folder = str(self.processes.folder(host))
            self._send(host, {"type": "add", "torrent": torrent, "folder": folder, "is_seed": host == SEED_HOST})
        waiting = {SEED_HOST, *self._workers}
        until_s = time.monotonic() + _START_S
        while waiting:
            host, word = self._read(until_s)
            if word["type"] == "ready":
                waiting.discard(host)

    def distribute(self, until_s: float, fault: Fault | None) -> tuple[dict[int, float], int | None]:
        victim = self._workers[len(self._workers) // 2] if fault else None
        began_s = time.monotonic()
        for host in self._workers:  # each pair once, so every two are peers
            addresses = [self._network.address(other) for other in range(host)]
            self._send(host, {"type": "connect", "addresses": addresses})
        arrived: dict[int, float] = {}
        waiting = set(self._workers) - {victim}
        while waiting:
            message = self.processes.read(until_s)
            if message is None:
                raise Broken(f"after {time.monotonic() - began_s:.0f} s hosts {sorted(waiting)} still lack something")
            word = msgspec.msgpack.decode(message.body)
            if word["type"] == "whole" and message.host in waiting:
                waiting.discard(message.host)
                arrived[message.host] = message.read_s - began_s
            elif fault and message.host == victim and word.get("share", 0.0) >= FAULT_AT:
                self.processes.signal(victim, signal.SIGKILL if fault is Fault.KILL else signal.SIGSTOP)
                fault = None
        return arrived, victim

    def details(self) -> dict[str, Any]:
        return {}

    def _send(self, host: int, order: dict[str, Any]) -> None:
        self.processes.send(host, msgspec.msgpack.encode(order))

    def _read(self, until_s: float) -> tuple[int, dict[str, Any]]:
        message = self.processes.read(until_s)
        if message is None:
            raise Broken("a libtorrent session did not answer")
        return message.host, msgspec.msgpack.decode(message.body)

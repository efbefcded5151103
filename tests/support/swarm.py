"""Relays of one run on loopback, with real sockets, TLS, threads and files, that feed each other as a test says.

The seed's director is replaced by ``FixedDirector``, so that a test knows who is whose parent. Relays live in this
process, where a test can bend them (a fault is a subclass of the shell), or each in its own, where it can be killed.

    python swarm.py PACE    is such a relay process; PACE: chunk bytes per second that each of its connections sends
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import msgspec
from relays import Published, RunKeys

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay import control as c
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.channel import encode_message
from echo2.broadcast.relay.process import serve
from echo2.broadcast.relay.shell import RelayShell

PATIENCE_S = 25.0
"""Far more than anything here takes on an idle machine."""
MakeShell = Callable[[c.Open, Callable[[c.Word], None]], RelayShell]


def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < patience_s, f"waited {patience_s:g} s for {what}"
        time.sleep(0.01)


def is_chunk(frame: memoryview | bytes) -> bool:
    return len(frame) > 0 and frame[0] == f.CHUNK


def paced(bytes_per_s: float, shell: type[RelayShell] = RelayShell) -> MakeShell:
    """A shell whose connections each send chunks no faster than this."""

    class Paced(shell):  # type: ignore[valid-type,misc]
        def next_frame(self, number: int, buffer: bytearray) -> memoryview | bytes:
            frame: memoryview | bytes = super().next_frame(number, buffer)
            if is_chunk(frame):
                time.sleep(len(frame) / bytes_per_s)
            return frame

    return Paced


class FixedDirector:
    """Assigns every object to one tree: who is fed by whom, from the first chunk to the last."""

    def __init__(self, parents: Mapping[str, str], rate_bytes_per_s: float) -> None:
        """parents: node → its parent, ``SEED`` or another node."""
        self._parents = dict(parents)
        self._rate_bytes_per_s = rate_bytes_per_s
        self._manifests: dict[str, bytes] = {}
        self._outbox: list[tuple[str, f.Assign]] = []
        self._lock = threading.Lock()
        self.seed_port = 0
        self.where: dict[str, f.Source] = {}
        self.reports: dict[str, f.Report] = {}
        self.reachable: dict[str, bool] = {}
        self.predicted_s = self.bound_s = 0.0

    def node_joined(self, node_id: str, host: str, port: int, now: float) -> None:
        with self._lock:
            self.where[node_id] = f.Source(node_id, host, port)
            self._outbox += [(node_id, self.assignment(node_id, signed)) for signed in self._manifests.values()]

    def publish(self, facts: Any, now: float) -> None:
        with self._lock:
            self._manifests[facts.root] = facts.manifest
            self._outbox += [(node, self.assignment(node, facts.manifest)) for node in (SEED, *self.where)]

    def report(self, node_id: str, report: f.Report, now: float) -> None:
        self.reports[node_id] = report

    def reachability(self, source: f.Source, reachable: bool, now: float) -> None:
        self.reachable[source.node_id] = reachable

    def probes_due(self, now: float) -> list[f.Source]:
        return []

    def take(self) -> list[tuple[str, f.Assign]]:
        with self._lock:
            outbox, self._outbox = self._outbox, []
        return outbox

    def node_left(self, node_id: str, now: float) -> None: ...

    def withdraw(self, root: str) -> None: ...

    def egress(self, bytes_per_s: float, now: float) -> None: ...

    def tick(self, now: float) -> None: ...

    def nodes(self) -> tuple[c.NodeState, ...]:
        return ()

    def assignment(self, node_id: str, signed: bytes, generation: int = 1) -> f.Assign:
        above = [self.where[node] for node in self.above(node_id) if node in self.where]
        sources = (*above, f.Source(SEED, "127.0.0.1", self.seed_port))
        feed = f.Feed(sources, (), self._rate_bytes_per_s, spills=True)
        below = tuple(node for node in self._parents if node_id in (SEED, *self.above(node)))
        children = sum(parent == node_id for parent in self._parents.values())
        return f.Assign(generation, signed, () if node_id == SEED else (feed,), below, children)

    def inject(self, node_id: str, assign: f.Assign) -> None:
        with self._lock:
            self._outbox.append((node_id, assign))

    def above(self, node_id: str) -> list[str]:
        """Nodes between this one and the seed, nearest first."""
        nodes: list[str] = []
        while (node_id := self._parents.get(node_id, SEED)) != SEED:
            nodes.append(node_id)
        return nodes


class Relay(ABC):
    """A relay as its program sees it."""

    def __init__(self, opening: c.Open) -> None:
        self.folder = Path(opening.folder)
        self.words: list[c.AnyWord] = []
        self.port = 0

    @abstractmethod
    def order(self, order: c.Order) -> None: ...

    @abstractmethod
    def close(self) -> None: ...

    def said(self, kind: type[Any]) -> list[Any]:
        return [word for word in list(self.words) if isinstance(word, kind)]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event.fields for event in self.said(c.Event) if event.kind == kind]

    def has(self, published: Published) -> bool:
        """Whether it said so; what it then has must be right (I6)."""
        for word in self.said(c.Whole):
            if word.root == published.root:
                assert Path(word.path).read_bytes() == published.content, "a whole object is the published one"
                return True
        return False

    def share(self, published: Published) -> float:
        """How much of the object it told to have so far."""
        tallies = [tally for tally in self.said(c.Tally) if published.root in tally.progress]
        return tallies[-1].progress[published.root] if tallies else 0.0

    def tally(self) -> c.Tally:
        return (self.said(c.Tally) or [c.Tally(0, 0, 0, {})])[-1]


class RelayHere(Relay):
    """In this process."""

    def __init__(self, opening: c.Open, make: MakeShell = RelayShell) -> None:
        super().__init__(opening)
        self.shell = make(opening, self.words.append)  # type: ignore[arg-type]
        self.port = self.shell.start()

    def order(self, order: c.Order) -> None:
        self.shell.obey(order)

    def close(self) -> None:
        self.shell.close()


class RelayThere(Relay):
    """In a process of its own."""

    def __init__(self, opening: c.Open, pace: float) -> None:
        super().__init__(opening)
        command = [sys.executable, __file__, str(pace)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.order(opening)
        until(lambda: self.said(c.Listening), "the relay process")
        self.port = self.said(c.Listening)[0].port

    def order(self, order: c.Order) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(encode_message(order))
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        self.process.kill()
        self._reader.join()
        self.process.__exit__(None, None, None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        decoder = msgspec.msgpack.Decoder(c.AnyWord)
        while head := self.process.stdout.read(4):
            self.words.append(decoder.decode(self.process.stdout.read(int.from_bytes(head, "big"))))


class Swarm:
    """A context that closes its relays."""

    def __init__(self, keys: RunKeys, director: FixedDirector, make_seed: MakeShell = RelayShell) -> None:
        self.keys = keys
        self.director = director
        self.relays: list[Relay] = []
        self.seed = self._open(RelayHere(keys.opening(), make_seed))
        assert isinstance(self.seed, RelayHere) and self.seed.shell._seed is not None
        self.seed.shell._seed.director = director  # type: ignore[assignment]
        director.seed_port = self.seed.port

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        threads = [threading.Thread(target=relay.close) for relay in self.relays]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def here(self, node_id: str, make: MakeShell = RelayShell) -> RelayHere:
        relay = RelayHere(self.keys.opening(node_id, self.seed.port), make)
        self._open(relay)
        return relay

    def there(self, node_id: str, pace: float = 1e12) -> RelayThere:
        relay = RelayThere(self.keys.opening(node_id, self.seed.port), pace)
        self._open(relay)
        return relay

    def publish(self, published: Published, after: int = 0) -> None:
        """Once ``after`` nodes have joined."""
        until(lambda: len(self.director.reachable) >= after, f"{after} nodes")
        self.seed.order(c.Publish(published.signed, str(published.path)))

    def _open(self, relay: Relay) -> Relay:
        self.relays.append(relay)
        return relay


if __name__ == "__main__":
    sys.exit(serve(paced(float(sys.argv[1]))))

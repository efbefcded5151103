from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from raw_peer import RawPeer
from relays import RunKeys
from swarm import until

from echo2.broadcast.relay import control as c
from echo2.broadcast.relay import doors, sockets
from echo2.broadcast.relay.doors import Doors, Threads
from echo2.broadcast.relay.frames import Greet, Source

Meet = Callable[[sockets.Greeted, bool], None]


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys(tmp_path)


@contextmanager
def opened(keys: RunKeys, meet: Meet = lambda greeted, outbound: greeted.sock.close()) -> Iterator[tuple[Doors, int]]:
    """Doors, and the port they are at."""
    threads = Threads()
    made = Doors(keys.opening(), threads, meet, lambda word: None)
    try:
        yield made, made.open()
    finally:
        made.close()
        threads.join()
        assert not threads._running


class Room:
    """Stands in for greeting strangers, none of whom proves who it is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leave = threading.Semaphore(0)
        self.came = self.inside = self.most = 0

    def accept(self, sock: socket.socket, context: ssl.SSLContext, greet: Greet) -> sockets.Greeted:
        with self._lock:
            self.came, self.inside = self.came + 1, self.inside + 1
            self.most = max(self.most, self.inside)
        assert self._leave.acquire(timeout=20.0)
        with self._lock:
            self.inside -= 1
        sock.close()
        raise ConnectionError("a stranger")

    def let_one_out(self) -> None:
        self._leave.release()


def test_i9_strangers_beyond_the_places_wait_outside_until_one_is_free(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, places, strangers = Room(), 3, 8
    monkeypatch.setattr(doors, "MOST_STRANGERS", places)
    monkeypatch.setattr(sockets, "accept", room.accept)
    with opened(keys) as (_, port), ExitStack() as outside:
        for _ in range(strangers):
            outside.enter_context(socket.create_connection(("127.0.0.1", port)))
        for left in range(strangers + 1):
            until(lambda left=left: room.came == min(places + left, strangers), "strangers to come in")  # type: ignore[misc]
            room.let_one_out()
    assert room.most == places


def test_who_greeted_does_not_take_a_strangers_place(keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "MOST_STRANGERS", 1)
    met: list[str] = []
    leave = threading.Event()

    def meet(greeted: sockets.Greeted, outbound: bool) -> None:
        met.append(greeted.peer)
        assert leave.wait(20.0)
        greeted.sock.close()

    with opened(keys, meet) as (_, port), ExitStack() as peers:
        for name in ("a", "b", "c"):
            peers.enter_context(RawPeer(keys, name, port))
        until(lambda: sorted(met) == ["a", "b", "c"], "all to be met")
        leave.set()


def test_i9_strangers_who_knock_all_the_time_do_not_fill_the_log(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors, "STRANGER_NEWS_S", 1000.0)
    words: list[c.Word] = []
    made = Doors(keys.opening(), Threads(), lambda greeted, outbound: None, words.append)
    for _ in range(5):
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname()).close()
            ours, _ = server.accept()
        made._strangers.acquire()
        made._receive(ours)
    assert [word.kind for word in words if isinstance(word, c.Event)] == ["relay_stranger"]


def test_i9_a_node_that_connects_again_and_again_is_dialled_back_by_one_thread(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was asked meanwhile only the last is answered: the rest is about connections that are gone."""
    gate, tried, answers = threading.Semaphore(0), [0], []

    def dial(source: Source, context: ssl.SSLContext, greet: Greet) -> sockets.Greeted:
        tried[0] += 1
        assert gate.acquire(timeout=20.0)
        raise ConnectionError("nobody")

    monkeypatch.setattr(sockets, "dial", dial)
    with opened(keys) as (made, _):
        for life in range(20):
            made.try_later(Source("a", "127.0.0.1", 1), lambda reachable, life=life: answers.append((life, reachable)))  # type: ignore[misc]
        until(lambda: tried[0] == 1, "the first try")
        gate.release()
        until(lambda: tried[0] == 2, "the second")
        gate.release()
        until(lambda: len(answers) == 2, "the answers")
        made.try_later(Source("b", "127.0.0.1", 0), lambda reachable: answers.append((99, reachable)))
        until(lambda: len(answers) == 3, "an answer about a node that listens nowhere")
    assert answers[0][0] in range(20)
    assert answers[1:] == [(19, False), (99, False)]
    assert tried[0] == 2

"""How connections come to be: threads that listen, dial and greet.

Invariant: every thread of a relay is one of ``Threads`` and is waited for when the relay closes; strangers who have not
proved who they are cost one of few places, for a few seconds at most.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

from echo2.broadcast.relay import control as c
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay import sockets
from echo2.errors import Malformed, Unauthorised
from echo2.transport.tls import peer_context

MOST_STRANGERS = 64
"""Connections that have not greeted yet."""
ACCEPT_POLL_S = 0.5
CLOSING_S = 2.0
ACCEPT_PAUSE_S = 0.1
"""After a connection could not be accepted."""
STRANGER_NEWS_S = 1.0
"""Strangers are told of at most so often: whoever knocks must not fill the log."""

_REFUSALS = (OSError, Malformed, Unauthorised)


class Threads:
    """A relay's threads; none is left running by ``join`` for longer than ``CLOSING_S``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[threading.Thread] = set()

    def start(self, work: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=lambda: self._run(work), name=name, daemon=True)
        with self._lock:  # one that has not started yet cannot be joined
            self._running.add(thread)
            thread.start()

    def join(self) -> None:
        deadline = time.monotonic() + CLOSING_S
        with self._lock:
            running = self._running - {threading.current_thread()}
        for thread in running:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        finally:
            with self._lock:
                self._running.discard(threading.current_thread())


class Doors:
    """Lets peers in and goes to them; ``meet`` is called in the connection's own thread and may keep it."""

    def __init__(
        self,
        order: c.Open,
        threads: Threads,
        meet: Callable[[sockets.Greeted, bool], None],
        say: Callable[[c.Word], None],
    ) -> None:
        """meet: (who greeted, whether we dialled)."""
        self._order = order
        self._threads = threads
        self._meet = meet
        self._say = say
        self._server = peer_context(True, order.authority_pem, order.certificate_pem, order.key_pem)
        self._client = peer_context(False, order.authority_pem, order.certificate_pem, order.key_pem)
        self._strangers = threading.Semaphore(MOST_STRANGERS)
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._port = 0
        self._trying_lock = threading.Lock()
        self._to_try: dict[str, tuple[f.Source, Callable[[bool], None]]] = {}
        """By node that is tried: what was asked last."""
        self._strangers_told_s = float("-inf")

    def open(self) -> int:
        """Listen; return the port. Raises OSError."""
        self._socket = sockets.listen(self._order.host, self._order.port)
        self._socket.settimeout(ACCEPT_POLL_S)
        self._port = int(self._socket.getsockname()[1])
        self._threads.start(self._accept_all, "acceptor")
        return self._port

    def close(self) -> None:
        self._closed.set()
        if self._socket is not None:
            self._socket.close()

    def dial(self, source: f.Source, lane: int, failed: Callable[[str, bool], None]) -> None:
        """In a thread of its own: meet ``source``, or say why it ``failed``, and whether there is no way to it."""
        self._threads.start(lambda: self._dial(source, lane, failed), f"dial {source.node_id}")

    def try_later(self, source: f.Source, tried: Callable[[bool], None]) -> None:
        """In a thread of its own: whether the relay answers there and is who it should be.

        One thread per node, however often that connects: of what is asked meanwhile only the last is answered.
        """
        with self._trying_lock:
            is_trying = source.node_id in self._to_try
            self._to_try[source.node_id] = (source, tried)
        if not is_trying:
            self._threads.start(lambda: self._try(source.node_id), f"probe {source.node_id}")

    def _try(self, node_id: str) -> None:
        answered: object = None
        while True:
            with self._trying_lock:
                newest = source, tried = self._to_try[node_id]
                if newest is answered or self._closed.is_set():
                    del self._to_try[node_id]
                    return
            tried(self._can_reach(source))
            answered = newest

    def _can_reach(self, source: f.Source) -> bool:
        if source.port == 0:
            return False
        try:
            sockets.dial(source, self._client, self._greeting()).sock.close()
        except _REFUSALS as error:
            self._say(c.Event("relay_unreachable", {"node": source.node_id, "error": str(error)[:200]}))
            return False
        return True

    def _greeting(self, lane: int = 0) -> f.Greet:
        return f.Greet(f.RELAY_PROTOCOL, self._order.run_id, self._port, lane)

    def _dial(self, source: f.Source, lane: int, failed: Callable[[str, bool], None]) -> None:
        try:
            greeted = sockets.dial(source, self._client, self._greeting(lane))
        except _REFUSALS as error:
            failed(str(error)[:200] or type(error).__name__, isinstance(error, sockets.NotReached))
        else:
            self._meet(greeted._replace(lane=lane), True)

    def _accept_all(self) -> None:
        """Consumes connections; waits half a second at most; unblocked by a stranger; produces greeting threads."""
        assert self._socket is not None, "opened"
        while not self._closed.is_set():
            if not self._strangers.acquire(timeout=ACCEPT_POLL_S):  # who comes now waits in the kernel
                continue
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                self._strangers.release()
                if not isinstance(error, TimeoutError):  # the door was closed, or too many files are open just now
                    self._closed.wait(ACCEPT_PAUSE_S)
                continue
            self._threads.start(lambda sock=sock: self._receive(sock), "greeting")  # type: ignore[misc]

    def _receive(self, sock: socket.socket) -> None:
        try:
            greeted = sockets.accept(sock, self._server, self._greeting())
        except _REFUSALS as error:
            self._tell_of_stranger(str(error)[:200] or type(error).__name__)
            return
        finally:
            self._strangers.release()
        self._meet(greeted, False)

    def _tell_of_stranger(self, why: str) -> None:
        now = time.monotonic()
        if now - self._strangers_told_s >= STRANGER_NEWS_S:
            self._strangers_told_s = now
            self._say(c.Event("relay_stranger", {"error": why}))

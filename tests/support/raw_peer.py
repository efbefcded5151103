"""A peer that says whatever a test wants, over real TLS."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from typing import Self

from relays import RunKeys

from echo2.broadcast.relay import frames as f
from echo2.transport.tls import peer_context

DEADLINE_S = 10.0


class RawPeer:
    """A certified peer's end of one connection. Frames go out as given; what comes in is collected."""

    def __init__(self, keys: RunKeys, node_id: str, port: int, *, listens_on: int = 0, lane: int = 0) -> None:
        """Dial the relay on ``port`` and greet."""
        opening = keys.opening(node_id, 1)
        context = peer_context(False, opening.authority_pem, opening.certificate_pem, opening.key_pem)
        plain = socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S)
        self._begin(context.wrap_socket(plain), keys, listens_on, lane)

    @classmethod
    def accepted(cls, tls: ssl.SSLSocket, keys: RunKeys) -> Self:
        """The other side dialled."""
        self = cls.__new__(cls)
        self._begin(tls, keys, 0, 0)
        return self

    def _begin(self, tls: ssl.SSLSocket, keys: RunKeys, listens_on: int, lane: int) -> None:
        self._tls = tls
        self.frames: list[f.AnyControl] = []
        self.chunks: list[int] = []
        self.send(f.encode_control(f.Greet(f.RELAY_PROTOCOL, keys.run_id, listens_on, lane)))

    def send(self, data: bytes) -> None:
        self._tls.sendall(data)

    def say(self, *controls: f.Control) -> None:
        self.send(b"".join(f.encode_control(control) for control in controls))

    def read(self) -> bool:
        """Take one frame; False when the other side hung up. Raises TimeoutError after ``DEADLINE_S``."""
        try:
            kind, _, _, length, _, number = f.HEADER.unpack(self._exactly(f.HEADER.size))
            body = self._exactly(length)
        except (EOFError, ConnectionError, ssl.SSLError):
            return False
        if kind == f.CONTROL:
            self.frames.append(f.decode_control(body))
        elif kind == f.CHUNK:
            self.chunks.append(number)
        return True

    def is_hung_up(self) -> bool:
        """Read until the other side hangs up, which it must before long."""
        with contextlib.suppress(TimeoutError):
            for _ in range(10_000):
                if not self.read():
                    return True
        return False

    def close(self) -> None:
        self._tls.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _exactly(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            block = self._tls.recv(nbytes - len(data))
            if not block:
                raise EOFError
            data += block
        return data


class RawParent:
    """Listens as ``node_id`` and answers every ``Want`` by claiming a backlog of ``claims`` and sending nothing."""

    def __init__(self, keys: RunKeys, node_id: str, claims: int) -> None:
        opening = keys.opening(node_id, 1)
        self._keys = keys
        self._claims = claims
        self._context = peer_context(True, opening.authority_pem, opening.certificate_pem, opening.key_pem)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._closed = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()
        self.wanted = 0
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._lie, args=(plain,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _lie(self, plain: socket.socket) -> None:
        streams: set[int] = set()
        try:
            plain.settimeout(DEADLINE_S)
            peer = RawPeer.accepted(self._context.wrap_socket(plain, server_side=True), self._keys)
        except OSError:
            plain.close()
            return
        with peer, contextlib.suppress(OSError):
            while not self._closed.is_set():
                peer._tls.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    if not peer.read():
                        return
                streams |= {frame.stream for frame in peer.frames if isinstance(frame, f.Want)}
                self.wanted = max(self.wanted, len(streams))
                peer.say(f.Beat(dict.fromkeys(streams, self._claims)))

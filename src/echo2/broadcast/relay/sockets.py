"""Relay connections from address to greeted peer.

Invariant: whoever comes out of ``dial`` or ``accept`` proved its id with a certificate of the run, speaks this
protocol and belongs to this run; all of it within a deadline, however slowly the other side speaks and however many
addresses it has. A name server takes its own time before.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from echo2.broadcast.relay import frames as f
from echo2.errors import Malformed, Unauthorised
from echo2.transport.tls import peer_id_of

GREETING_S = 5.0
"""For TCP, TLS and greeting together."""
LOW_WATER_BYTES = 256 * 1024
"""Unsent bytes in the kernel above which nothing more is chosen to be sent."""
USER_TIMEOUT_MS = 10_000
MAX_GREETING_BYTES = 4096
LANES_WITHOUT_BBR = 4
"""Connections per feed where loss would keep a single one slow."""

_BBR, _ANOTHER = b"bbr", b"reno"
"""Reno is in every kernel."""
_SO_MAX_PACING_RATE = 47
"""Linux's number, which Python's ``socket`` does not name."""
_FASTEST_PACE = 2**31
"""Bytes per second that do not fit the option any more; nothing is held back then."""
_OWN_TROUBLE = frozenset(
    {
        errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ENETDOWN, errno.EADDRNOTAVAIL,
        socket.EAI_AGAIN,  # no name server answers
    }
)  # fmt: skip
_FLOW = struct.Struct("=68xI48xQQ12xI")
"""Where ``tcpi_rtt``, ``tcpi_bytes_acked``, ``tcpi_bytes_received`` and ``tcpi_min_rtt`` lie in Linux's ``struct
tcp_info``."""
_WAITS, _JITTER_US = 1.5, 2000
"""Packets that take so many times the shortest round trip, and a little, wait in a queue."""


class Greeted(NamedTuple):
    sock: ssl.SSLSocket
    peer: str
    host: str
    """Address the peer was seen at."""
    port: int
    """Where it listens; 0 for nowhere."""
    lane: int


class NotReached(OSError):
    """No connection came about, and that is not for want of something on this machine."""


class Flow(NamedTuple):
    """Since the connection was made."""

    rtt_us: int
    """Smoothed."""
    acked_bytes: int
    """That arrived at the other side."""
    received_bytes: int
    min_rtt_us: int
    """Shortest of the last minutes."""

    @property
    def queues(self) -> bool:
        """Whether packets, or their acknowledgements, wait for others somewhere on the way."""
        return self.rtt_us > _WAITS * self.min_rtt_us + _JITTER_US


_NOTHING = Flow(0, 0, 0, 0)


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=256)


def lanes_needed() -> int:
    """1 where the kernel lets us use BBR, else several connections per feed."""
    with socket.socket() as sock:
        return 1 if _use_bbr(sock) else LANES_WITHOUT_BBR


def dial(source: f.Source, context: ssl.SSLContext, greet: f.Greet) -> Greeted:
    """Raises NotReached, OSError (TLS errors included), Malformed, Unauthorised when somebody else answers."""
    try:
        addresses = socket.getaddrinfo(source.host, source.port, type=socket.SOCK_STREAM)
        deadline = time.monotonic() + GREETING_S
        plain = _connect([address[:2] for *_, address in addresses], deadline)
    except (ValueError, OverflowError):  # not even a host name, or a port
        where = f"{source.host[:80]}:{source.port}"
        raise NotReached(f"relay {source.node_id} must have an address, not {where}") from None
    except OSError as error:
        if error.errno in _OWN_TROUBLE:
            raise
        raise NotReached(str(error) or type(error).__name__) from error
    greeted = _greet(plain, context, greet, deadline, server=False)
    if greeted.peer != source.node_id:
        greeted.sock.close()
        raise Unauthorised(f"{source.host}:{source.port} must be relay {source.node_id}, it is {greeted.peer}")
    return greeted


def _connect(addresses: Sequence[tuple[Any, ...]], deadline: float) -> socket.socket:
    """To the first that answers. One that does not takes only its share of the time from those after it."""
    for place, address in enumerate(addresses, start=1):
        share_s = max(deadline - time.monotonic(), 0.01) / (len(addresses) - place + 1)
        try:
            return socket.create_connection(address, timeout=share_s)
        except OSError as error:
            if place == len(addresses) or error.errno in _OWN_TROUBLE:
                raise
    raise NotReached("a name must have an address")


def accept(sock: socket.socket, context: ssl.SSLContext, greet: f.Greet) -> Greeted:
    """Raises OSError (TLS errors included), Malformed, Unauthorised."""
    return _greet(sock, context, greet, time.monotonic() + GREETING_S, server=True)


def flow_of(sock: socket.socket) -> Flow:
    """What the connection carried, by the kernel's account: neither full buffers nor a late reader distort it."""
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _FLOW.size)
    except (OSError, AttributeError):
        return _NOTHING
    return Flow(*_FLOW.unpack(info)) if len(info) == _FLOW.size else _NOTHING


def pace(sock: socket.socket, bytes_per_s: float) -> None:
    """Let the kernel send no faster; 0 for as fast as it goes. No effect where the kernel cannot. Raises OSError for a
    closed socket."""
    if sys.platform == "linux":
        limit = int(bytes_per_s) if 1 <= bytes_per_s < _FASTEST_PACE else -1
        sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, limit)


def renew(sock: socket.socket) -> None:
    """Let BBR forget what it knows of the connection. No effect where there is no BBR, or on a closed socket."""
    if _use_bbr(sock) and _set_congestion(sock, _ANOTHER):
        _use_bbr(sock)


def _greet(plain: socket.socket, context: ssl.SSLContext, greet: f.Greet, deadline: float, *, server: bool) -> Greeted:
    sock: socket.socket = plain
    try:
        host = plain.getpeername()[0]
        _tune(plain)
        plain.settimeout(max(deadline - time.monotonic(), 0.01))
        tls = sock = context.wrap_socket(plain, server_side=server, do_handshake_on_connect=False)
        tls.do_handshake()
        peer = peer_id_of(tls)
        tls.sendall(f.encode_control(greet))
        theirs = _read_greeting(tls, deadline)
        if theirs.protocol != f.RELAY_PROTOCOL:
            raise Malformed(
                f"relay {peer} speaks protocol {theirs.protocol}, this one {f.RELAY_PROTOCOL}: same version?"
            )
        if theirs.run_id != greet.run_id:
            raise Unauthorised(f"relay {peer} belongs to another run")
        return Greeted(tls, peer, host, theirs.port, theirs.lane)
    except BaseException:
        sock.close()
        raise


def _read_greeting(tls: ssl.SSLSocket, deadline: float) -> f.Greet:
    kind, _, _, length, _, _ = f.HEADER.unpack(_read_exactly(tls, f.HEADER.size, deadline))
    if kind != f.CONTROL or length > MAX_GREETING_BYTES:
        raise Malformed(f"a relay greets first, in at most {MAX_GREETING_BYTES} bytes; got type {kind}, {length} bytes")
    frame = f.decode_control(_read_exactly(tls, length, deadline))
    if not isinstance(frame, f.Greet):
        raise Malformed(f"a relay greets first, got {type(frame).__name__}")
    return frame


def _read_exactly(tls: ssl.SSLSocket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        tls.settimeout(max(deadline - time.monotonic(), 0.01))
        block = tls.recv(nbytes - len(data))
        if not block:
            raise ConnectionError("the other relay closed the connection while greeting")
        data += block
    return data


def _tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    _use_bbr(sock)
    for option, value in (("TCP_NOTSENT_LOWAT", LOW_WATER_BYTES), ("TCP_USER_TIMEOUT", USER_TIMEOUT_MS)):
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _use_bbr(sock: socket.socket) -> bool:
    return _set_congestion(sock, _BBR)


def _set_congestion(sock: socket.socket, name: bytes) -> bool:
    """Whether this system has it and lets us."""
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
    except (OSError, AttributeError):
        return False
    return True

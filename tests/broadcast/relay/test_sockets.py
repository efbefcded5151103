from __future__ import annotations

import errno
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from echo2.broadcast.relay import sockets
from echo2.broadcast.relay.frames import RELAY_PROTOCOL, Greet, Source
from echo2.broadcast.relay.sockets import NotReached, flow_of, lanes_needed, pace, renew

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pacing and TCP_INFO are Linux's")


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        sender.settimeout(20.0)
        receiver.settimeout(20.0)
        yield sender, receiver


def carry(sender: socket.socket, receiver: socket.socket, nbytes: int) -> float:
    """Seconds until all have arrived."""
    began_s = time.monotonic()
    sending = threading.Thread(target=lambda: sender.sendall(bytes(nbytes)))
    sending.start()
    while nbytes > 0:
        nbytes -= len(receiver.recv(1 << 16))
    sending.join(20.0)
    return time.monotonic() - began_s


def test_a_paced_connection_takes_as_long_as_its_pace_says_and_a_freed_one_does_not(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    sender, receiver = pair
    pace(sender, 2e6)
    paced_s = carry(sender, receiver, 1_200_000)
    assert paced_s > 0.3
    pace(sender, 0)
    assert carry(sender, receiver, 1_200_000) < paced_s
    there, here = flow_of(sender), flow_of(receiver)
    assert there.acked_bytes >= 2_300_000
    assert here.received_bytes == 2_400_000
    assert 0 < there.min_rtt_us <= there.rtt_us < 1_000_000


@pytest.mark.parametrize("rate", [0.0, 0.5, 2.0**31, 1e15])
def test_rates_that_the_kernel_cannot_take_hold_nothing_back(
    pair: tuple[socket.socket, socket.socket], rate: float
) -> None:
    pace(pair[0], rate)
    assert carry(*pair, 1_000_000) < 5.0


def test_a_closed_socket_is_an_error_that_the_caller_can_catch() -> None:
    sock = socket.socket()
    sock.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        pace(sock, 1e6)


@pytest.mark.skipif(lanes_needed() > 1, reason="this kernel has no BBR, or does not let us use it")
def test_a_renewed_connection_carries_on_with_bbr(pair: tuple[socket.socket, socket.socket]) -> None:
    sender, receiver = pair
    for _ in range(3):
        renew(sender)
        assert sender.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0") == b"bbr"
        carry(sender, receiver, 500_000)


def test_a_closed_connection_is_not_renewed() -> None:
    sock = socket.socket()
    sock.close()
    renew(sock)


def dial(port: int, host: str = "127.0.0.1") -> sockets.Greeted:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    return sockets.dial(Source("p", host, port), context, Greet(RELAY_PROTOCOL, "run", 0))


def test_where_nobody_listens_there_is_no_way() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(NotReached):
        dial(port)


def test_who_is_slow_to_greet_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "GREETING_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.raises(OSError, match="timed out") as caught:
        dial(server.getsockname()[1])
    assert not isinstance(caught.value, NotReached)


def test_an_address_that_does_not_answer_takes_no_time_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a machine whose name has an IPv6 address that packets do not reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, connect, resolve = server.getsockname()[1], socket.create_connection, socket.getaddrinfo
        given_s: list[float] = []

        def connect_or_not(address: tuple[str, int], timeout: float) -> socket.socket:
            given_s.append(timeout)
            if address[0] != "127.0.0.1":
                raise TimeoutError("timed out")
            return connect(address, timeout)

        def resolve_twice(host: str, *rest: int, **options: int) -> list[tuple[object, ...]]:
            hosts = ("127.9.9.9", "127.0.0.1") if host == "two.test" else (host,)
            return [found for host in hosts for found in resolve(host, *rest, **options)]

        monkeypatch.setattr(socket, "create_connection", connect_or_not)
        monkeypatch.setattr(socket, "getaddrinfo", resolve_twice)
        monkeypatch.setattr(sockets, "GREETING_S", 0.4)
        with pytest.raises(OSError, match="timed out") as caught:
            dial(port, "two.test")
    assert not isinstance(caught.value, NotReached)
    assert given_s[0] <= 0.2 <= given_s[1]


def test_a_name_server_that_does_not_answer_says_nothing_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(host: str, port: int, **options: int) -> list[tuple[object, ...]]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(OSError, match="Temporary failure") as caught:
        dial(1)
    assert not isinstance(caught.value, NotReached)


def test_too_many_open_files_here_say_nothing_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(address: object, timeout: float) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "create_connection", no_more)
    with pytest.raises(OSError, match="Too many open files") as caught:
        dial(1)
    assert not isinstance(caught.value, NotReached)

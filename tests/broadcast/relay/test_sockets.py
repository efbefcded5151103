from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from echo2.broadcast.relay.sockets import flow_of, pace

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

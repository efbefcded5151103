from __future__ import annotations

import os
import ssl
from typing import Any

import pytest

from echo2.broadcast.relay.sockets import Greeted
from echo2.broadcast.relay.wires import MOST_WIRES_PER_PEER, Wires

SOCKET: Any = ssl.SSLSocket.__new__(ssl.SSLSocket)
ENDS: Any = None


@pytest.fixture
def wires() -> Any:
    made = Wires()
    yield made
    for wire in made.all():
        os.close(wire._wake_in)
        os.close(wire._wake_out)


def greeted(peer: str) -> Greeted:
    return Greeted(SOCKET, peer, "host", 1, 0)


def test_one_peer_has_at_most_so_many_connections_and_others_have_theirs(wires: Wires) -> None:
    made = [wires.make(greeted("a"), ENDS) for _ in range(MOST_WIRES_PER_PEER)]
    assert wires.make(greeted("a"), ENDS) is None
    other = wires.make(greeted("b"), ENDS)
    assert other is not None
    assert wires.get(other.number) is other
    assert len({wire.number for wire in [*made, other] if wire is not None}) == MOST_WIRES_PER_PEER + 1


def test_a_peer_that_was_expelled_is_hung_up_on_and_not_taken_again(wires: Wires) -> None:
    mine, others = [wires.make(greeted("a"), ENDS) for _ in range(2)], wires.make(greeted("b"), ENDS)
    assert wires.expel("a") == mine
    assert wires.make(greeted("a"), ENDS) is None
    assert wires.make(greeted("b"), ENDS) is not None
    assert others in wires.all()


def test_a_connection_that_ended_makes_room_once(wires: Wires) -> None:
    first = wires.make(greeted("a"), ENDS)
    assert first is not None
    os.close(first._wake_in)
    os.close(first._wake_out)
    wires.forget(first, "a")
    wires.forget(first, "a")
    made = [wires.make(greeted("a"), ENDS) for _ in range(MOST_WIRES_PER_PEER + 1)]
    assert made.count(None) == 1
    assert first.number not in {wire.number for wire in made if wire is not None}


def test_too_many_open_files_are_one_connection_less_and_not_the_end(
    wires: Wires, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more(flags: int) -> tuple[int, int]:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pipe2", no_more)
        assert wires.make(greeted("a"), ENDS) is None
    assert wires.make(greeted("a"), ENDS) is not None

"""A relay's connections.

Invariant: there are never more of them than ``MOST_WIRES``, nor of one peer than ``MOST_WIRES_PER_PEER``, so neither a
crowd nor one enrolled peer uses up the open files of the others. Used under the shell's lock.
"""

from __future__ import annotations

from collections import Counter

from echo2.broadcast.relay.sockets import Greeted
from echo2.broadcast.relay.wire import Ends, Wire

MOST_WIRES = 4096
MOST_WIRES_PER_PEER = 64
"""Either way: four for each of its feeds from here, and what is just being replaced."""


class Wires:
    def __init__(self) -> None:
        self._wires: dict[int, Wire] = {}
        self._by_peer: Counter[str] = Counter()
        self._peers: dict[int, str] = {}
        self._expelled: set[str] = set()
        self._made = 0

    def make(self, greeted: Greeted, ends: Ends) -> Wire | None:
        """None when there are too many, and for a peer that was expelled."""
        if len(self._wires) >= MOST_WIRES or self._by_peer[greeted.peer] >= MOST_WIRES_PER_PEER:
            return None
        if greeted.peer in self._expelled:
            return None
        try:
            wire = Wire(self._made + 1, greeted.sock, ends)
        except OSError:  # too many open files
            return None
        self._made += 1
        self._wires[wire.number] = wire
        self._by_peer[greeted.peer] += 1
        self._peers[wire.number] = greeted.peer
        return wire

    def expel(self, peer: str) -> list[Wire]:
        """No connection of this peer is taken any more; those that it has, to be hung up."""
        self._expelled.add(peer)
        return [wire for number, wire in self._wires.items() if self._peers[number] == peer]

    def forget(self, wire: Wire, peer: str) -> None:
        """It ended."""
        if self._wires.pop(wire.number, None) is not None:
            self._by_peer[peer] -= 1
            del self._peers[wire.number]

    def get(self, number: int) -> Wire | None:
        return self._wires.get(number)

    def all(self) -> list[Wire]:
        return list(self._wires.values())

    def look(self, now: float) -> dict[int, tuple[int, int]]:
        """By wire: bytes that arrived at the other side, and here."""
        return {number: wire.look(now) for number, wire in self._wires.items()}

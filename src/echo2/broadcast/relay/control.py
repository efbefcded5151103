"""What a program and its relay process say to one another, over the process's standard input and output.

Invariant: each message is a 4-byte length (network order) and msgpack of one struct below; the relay ends when its
standard input does, so it never outlives its program.
"""

from __future__ import annotations

import msgspec

from echo2.broadcast.plan.model import Topology
from echo2.types import Policy

MAX_MESSAGE_BYTES = 40 * 1024 * 1024


class Order(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Program to relay."""


class Word(msgspec.Struct, frozen=True, tag=True, tag_field="type"):
    """Relay to program."""


# ---- orders ------------------------------------------------------------------------------------------------------


class Open(Order, frozen=True):
    """First, once: who the relay is. ``seed_host`` is empty for the seed itself."""

    node_id: str
    run_id: str
    manifest_key: bytes
    """Ed25519 public key of the run's manifests."""
    authority_pem: bytes
    certificate_pem: bytes
    key_pem: bytes
    host: str
    """Address to listen on."""
    port: int
    """0 for any free one."""
    folder: str
    """Where objects are kept while they come and while others may still want them."""
    seed_host: str = ""
    seed_port: int = 0
    topology: Topology = Topology.CHAIN
    """The seed's alone, like the two below."""
    gamma: float = 1.1
    advertised_host: str = ""
    """Under which others reach nodes of the seed's own machine."""


class Publish(Order, frozen=True):
    """Seed: this object is whole at ``path``; send it to every connected node that has its base (an anchor: to those
    that ask)."""

    manifest: bytes
    path: str


class Withdraw(Order, frozen=True):
    """Forget an object; a node deletes its file, the seed only lets go of it."""

    root: str


class Expel(Order, frozen=True):
    """Seed: talk to this node no more, and let nobody feed it or be fed by it."""

    node_id: str


class Hold(Order, frozen=True):
    """Node: the snapshots that lie decoded on this machine, by decoded root; replaces what was said before."""

    decoded_roots: tuple[str, ...]


class Bring(Order, frozen=True):
    """Node: this object is needed."""

    manifest: bytes
    """Signed."""


# ---- words -------------------------------------------------------------------------------------------------------


class Listening(Word, frozen=True):
    port: int


class Alive(Word, frozen=True):
    """Nothing to say; sent after a few quiet seconds, so that a frozen relay is noticed."""


class Whole(Word, frozen=True):
    """Every chunk of the object is here and verified."""

    root: str
    path: str


class Announced(Word, frozen=True):
    """Node: a signed manifest came from the seed and its object is on the way, asked for or not."""

    root: str
    policy: Policy
    size_bytes: int = 0


class Stuck(Word, frozen=True):
    """Node: an object that is needed makes no progress; the program may repair ``path`` by other means and ``Bring``
    it again: chunks that are right by then are kept."""

    root: str
    path: str
    why: str


class Event(Word, frozen=True):
    """A line for the program's event log."""

    kind: str
    fields: dict[str, str | int | float | bool]


class NodeState(msgspec.Struct, frozen=True):
    """A node as the seed knows it, for people and metrics."""

    node_id: str
    reachable: bool | None
    """Whether others can dial it; None until that was tried."""
    up_bytes_per_s: float
    down_bytes_per_s: float
    parent: str
    """In the standing plan; empty for none."""
    sent_bytes: int
    received_bytes: int
    reparentings: int


class Tally(Word, frozen=True):
    """About once a second while something changes."""

    sent_bytes: int
    received_bytes: int
    reparentings: int
    progress: dict[str, float]
    """Share of each object, under way or whole, that is here."""
    uplink_bytes_per_s: float = 0.0
    """The seed's: B_0 as measured."""
    nodes: tuple[NodeState, ...] = ()
    """The seed's."""
    predicted_s: float = 0.0
    """The seed's: of the newest object's plan, for the share 1/gamma; 0 before the first."""
    bound_s: float = 0.0


AnyOrder = Open | Publish | Withdraw | Expel | Hold | Bring
AnyWord = Listening | Alive | Whole | Announced | Stuck | Event | Tally

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from echo2.broadcast.catalogue import Entry
from echo2.broadcast.disk_shelf import DiskShelf
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay.client import RelayClient
from echo2.broadcast.relay.control import NodeState, Tally
from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.coordinator.relays import RelayStanding
from echo2.coordinator.seed import RelaySeed, seed_client
from echo2.errors import Malformed, UserError
from echo2.simulation.record import RecordedEvents
from echo2.transport.tls import new_peer_key, peer_id_of
from echo2.types import Policy, SnapshotKind


class Shelf:
    def __init__(self, *roots: str) -> None:
        self.roots = list(roots)

    def catalogue(self) -> list[Entry]:
        return [Entry(Policy(0, 0), SnapshotKind.ANCHOR, None, root, 10, "d") for root in self.roots]

    def signed(self, root: str) -> bytes | None:
        return f"signed {root}".encode() if root in self.roots else None

    def object_path(self, root: str) -> Path | None:
        return Path(root) if root in self.roots else None


class Client:
    port = 7001

    def __init__(self) -> None:
        self.told: list[Any] = []
        self.tally = Tally(0, 0, 0, {})
        self.taken: list[UserError] = []

    async def __aenter__(self) -> None:
        if self.taken:
            raise self.taken.pop()
        self.told.append("begun")

    async def __aexit__(self, *error: object) -> None:
        self.told.append("ended")

    async def publish(self, signed: bytes, path: Path) -> None:
        self.told.append((signed, path))

    async def withdraw(self, root: str) -> None:
        self.told.append(root)


def config(**sections: dict[str, Any]) -> Config:
    return build_config({"rollout": {"engine": "scripted"}, **sections}, check_places=False)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def client(keys: Path) -> Client:
    seed_client(config(), "run", b"k" * 32, keys.parent, RecordedEvents())  # makes the authority
    return Client()


def seed(client: Client, keys: Path, *roots: str, **sections: dict[str, Any]) -> RelaySeed:
    shelf = cast(DiskShelf, Shelf(*roots))
    return RelaySeed(cast(RelayClient, client), shelf, keys, config(**sections))


async def test_a_restarted_coordinators_relay_gets_all_that_earlier_lives_published(client: Client, keys: Path) -> None:
    async with seed(client, keys, "a", "b") as made:
        assert client.told == ["begun", (b"signed a", Path("a")), (b"signed b", Path("b"))]
        await made.publish("gone")  # pruned in this very moment
        await made.withdraw("a")
    assert client.told[3:] == ["a", "ended"]
    assert (keys / "relay-port").read_text() == "7001"


async def test_a_port_that_is_still_held_for_a_moment_is_waited_for(
    client: Client, keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.coordinator.seed.PORT_PAUSE_S", 0.0)
    client.taken = [UserError("127.0.0.1:7001 is not free")] * 2
    async with seed(client, keys):
        pass
    monkeypatch.setattr("echo2.coordinator.seed.PORT_PATIENCE_S", -1.0)
    client.taken = [UserError("127.0.0.1:7001 is not free")]
    with pytest.raises(UserError, match="is not free"):
        async with seed(client, keys):
            pass


async def test_a_workers_key_is_certified_under_its_own_id_and_nothing_else_is(client: Client, keys: Path) -> None:
    made = seed(client, keys, broadcast={"advertise": "relay.example"})
    _, public = new_peer_key()
    reply = await made.certify("worker-1", public)
    certificate = x509.load_pem_x509_certificate(reply.certificate_pem)
    (name,) = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    assert name.value == "worker-1"
    certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(reply.authority_pem))
    assert (reply.seed_host, reply.seed_port) == ("relay.example", 7001)
    with pytest.raises(Malformed):
        await made.certify("worker-1", b"no key")


async def test_what_workers_sent_is_told_by_worker_also_after_they_left(client: Client, keys: Path) -> None:
    def node(name: str, sent: int, reparentings: int = 0) -> NodeState:
        return NodeState(name, True, 1.0, 1.0, SEED, sent, 0, reparentings)

    made = seed(client, keys)
    assert made.traffic().predicted_s is None
    client.tally = Tally(100, 0, 0, {}, 1e6, (node("w1", 30, 1), node("w2", 0, 2)), 1.5, 1.25)
    told = made.traffic()
    assert (told.predicted_s, told.bound_s, told.seed_sent_bytes, told.reparentings) == (1.5, 1.25, 100, 3)
    client.tally = Tally(120, 0, 0, {}, 1e6, (node("w2", 10),))
    assert made.traffic().sent_bytes_by_node == {"w1": 30, "w2": 10}
    assert made.traffic().reparentings == 1, "a count that may shrink is none"


async def test_whether_a_worker_can_be_dialled_is_unknown_once_it_left(client: Client, keys: Path) -> None:
    made = seed(client, keys)
    assert made.standings() == {}
    open_node = NodeState("w1", True, 1.0, 1.0, SEED, 30, 0, 2)
    client.tally = Tally(0, 0, 0, {}, 1e6, (open_node, NodeState("w2", False, 1.0, 1.0, SEED, 0, 0, 0)))
    assert made.standings() == {"w1": RelayStanding(True, 30, 2, SEED), "w2": RelayStanding(False, 0, 0, SEED)}
    client.tally = Tally(0, 0, 0, {}, 1e6, ())
    assert made.standings() == {"w1": RelayStanding(None, 30, 2), "w2": RelayStanding(None, 0, 0)}
    client.tally = Tally(0, 0, 0, {}, 1e6, (NodeState("w1", False, 1.0, 1.0, SEED, 1, 0, 0),))
    assert made.standings()["w1"] == RelayStanding(False, 1, 0, SEED), "a new life is judged anew"


@pytest.mark.parametrize(
    ("coordinator", "known_as"),
    [
        ({}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, ""),
        ({"host": "0.0.0.0", "advertise": "learner.example"}, "learner.example"),
    ],
)
def test_the_relay_listens_beside_the_coordinator_and_keeps_its_port(
    coordinator: dict[str, Any], known_as: str, keys: Path
) -> None:
    keys.mkdir()
    (keys / "relay-port").write_text("7123")
    made = config(coordinator=coordinator, broadcast={"topology": "ring"})
    client = seed_client(made, "run", b"k" * 32, keys.parent, RecordedEvents())
    order = client._opening
    assert (order.node_id, client.port, order.topology, order.seed_host) == (SEED, 7123, Topology.RING, "")
    assert order.host == made.coordinator.host
    assert order.advertised_host == known_as
    der = x509.load_pem_x509_certificate(order.certificate_pem).public_bytes(Encoding.DER)
    assert peer_id_of(der) == SEED

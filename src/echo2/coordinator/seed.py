"""The coordinator's own relay, as its programs see it.

Invariant: what is on the shelf is what the relay may send, from the first moment of a life to the last; a relay process
that died is told all of it again. Its key lives as long as the coordinator's process, in no file.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

import msgspec

from echo2.broadcast.disk_shelf import DiskShelf
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay.client import RelayClient
from echo2.broadcast.relay.control import Open
from echo2.config.root import Config
from echo2.coordinator.relays import RelayStanding
from echo2.durable import write_file
from echo2.errors import UserError
from echo2.metrics import Traffic
from echo2.ports import EventLog
from echo2.transport.messages import RelayCertificate
from echo2.transport.tls import ensure_authority, issue_peer_certificate, new_peer_key, utc_now

PORT_NAME = "relay-port"
PORT_PATIENCE_S, PORT_PAUSE_S = 5.0, 0.3
_EVERYWHERE = ("0.0.0.0", "::")


class RelaySeed:
    """Implements ``ports.Seed``. Use as a context: entering starts the relay process and gives it the shelf."""

    def __init__(self, client: RelayClient, shelf: DiskShelf, keys: Path, config: Config) -> None:
        self._client = client
        self._shelf = shelf
        self._keys = keys
        self._advertised_host = config.broadcast.advertise
        self._standings: dict[str, RelayStanding] = {}
        """A worker that left keeps its numbers: what it sent was sent."""

    async def __aenter__(self) -> Self:
        """Raises UserError when the relay cannot listen as configured, TransportError when it does not start."""
        await self._begin()
        try:
            write_file(self._keys / PORT_NAME, str(self._client.port).encode())
            for entry in self._shelf.catalogue():
                await self.publish(entry.root)
        except BaseException as error:
            await self._client.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._client.__aexit__(*error)

    async def _begin(self) -> None:
        deadline_s = asyncio.get_running_loop().time() + PORT_PATIENCE_S
        while True:
            try:
                await self._client.__aenter__()
                return
            except UserError:
                # The relay of a coordinator that was killed a moment ago may still hold the port.
                if asyncio.get_running_loop().time() > deadline_s:
                    raise
            await asyncio.sleep(PORT_PAUSE_S)

    async def publish(self, root: str) -> None:
        signed, path = self._shelf.signed(root), self._shelf.object_path(root)
        if signed is not None and path is not None:
            await self._client.publish(signed, path)

    async def withdraw(self, root: str) -> None:
        await self._client.withdraw(root)

    async def expel(self, peer_id: str) -> None:
        await self._client.expel(peer_id)

    async def certify(self, peer_id: str, public_key_pem: bytes) -> RelayCertificate:
        now = utc_now()
        certificate = await asyncio.to_thread(issue_peer_certificate, self._keys, public_key_pem, peer_id, now)
        authority = await asyncio.to_thread(ensure_authority, self._keys, now)
        return RelayCertificate(certificate, authority, self._advertised_host, self._client.port)

    def traffic(self) -> Traffic:
        tally, standings = self._client.tally, self.standings()
        return Traffic(
            predicted_s=tally.predicted_s or None,
            bound_s=tally.bound_s or None,
            seed_sent_bytes=tally.sent_bytes,
            sent_bytes_by_node={name: standing.sent_bytes for name, standing in sorted(standings.items())},
            reparentings=sum(standing.reparentings for standing in standings.values()),
        )

    def standings(self) -> dict[str, RelayStanding]:
        """Of each worker whose relay was connected in this life. Whether one that left can be dialled is unknown."""
        left = {
            name: msgspec.structs.replace(known, reachable=None, fed_by="") for name, known in self._standings.items()
        }
        self._standings = left | {
            node.node_id: RelayStanding(node.reachable, node.sent_bytes, node.reparentings, node.parent)
            for node in self._client.tally.nodes
        }
        return dict(self._standings)


def seed_client(config: Config, run_id: str, manifest_key: bytes, root: Path, events: EventLog) -> RelayClient:
    """The relay of run folder ``root``, not started yet. manifest_key: Ed25519 public key of the run's manifests."""
    keys, now = root / "keys", utc_now()
    authority = ensure_authority(keys, now)
    private, public = new_peer_key()
    host = config.coordinator.host
    known_as = config.broadcast.advertise or config.coordinator.advertise or ("" if host in _EVERYWHERE else host)
    opening = Open(
        node_id=SEED,
        run_id=run_id,
        manifest_key=manifest_key,
        authority_pem=authority,
        certificate_pem=issue_peer_certificate(keys, public, SEED, now),
        key_pem=private,
        host=host,
        port=config.broadcast.relay_port,
        folder=str(root / "snapshots"),
        topology=Topology(config.broadcast.topology),
        gamma=config.provisioning.gamma,
        advertised_host=known_as,
    )
    return RelayClient(opening, events, port_before=_port_before(keys))


def _port_before(keys: Path) -> int:
    """The port of the run's earlier life: relays that lost their seed dial the same address again."""
    try:
        return int((keys / PORT_NAME).read_text())
    except (FileNotFoundError, ValueError):
        return 0

"""A worker's relay: objects come from other workers, and go on to them.

Invariant (I6): an object's file is given out only when the relay, or the download that repaired it, compared every
chunk with the signed manifest. A worker whose relay does not work is slower and works all the same.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Mapping, Sequence
from pathlib import Path

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.client import RelayClient, RelayStuck
from echo2.broadcast.relay.control import Announced, Open
from echo2.ports import EventLog
from echo2.transport.join import JoinString
from echo2.transport.messages import Enrolled, RelayCertificate
from echo2.types import Policy
from echo2.worker.source import HttpSource, roots_in


def opening(join: JoinString, enrolled: Enrolled, certified: RelayCertificate, key_pem: bytes, folder: Path) -> Open:
    """How the worker's relay begins. Beside a coordinator on loopback it is there too; else others must reach it."""
    return Open(
        node_id=enrolled.peer_id,
        run_id=enrolled.run_id,
        manifest_key=enrolled.snapshot_public_key,
        authority_pem=certified.authority_pem,
        certificate_pem=certified.certificate_pem,
        key_pem=key_pem,
        host=_listening_host(join.address),
        port=0,
        folder=str(folder),
        seed_host=certified.seed_host or join.address,
        seed_port=certified.seed_port,
    )


def _listening_host(coordinator: str) -> str:
    try:
        address = ipaddress.ip_address(coordinator)
    except ValueError:
        return "127.0.0.1" if coordinator == "localhost" else "0.0.0.0"
    if address.is_loopback:
        return coordinator
    return "0.0.0.0" if address.version == 4 else "::"


class RelaySource:
    """Objects from other relays; what those do not bring is fetched from the coordinator into the same file."""

    def __init__(self, http: HttpSource, folder: Path, events: EventLog) -> None:
        """folder: the relay's. What lies there now is of an earlier life."""
        self._http = http
        self._events = events
        self._relay: RelayClient | None = None
        self._left = roots_in(folder)
        self._policies: dict[str, Policy] = {}
        """Of the objects that were announced or brought."""
        self._sizes: dict[str, int] = {}

    def use(self, relay: RelayClient) -> None:
        """Before the first ``bring``."""
        self._relay = relay

    def announced(self, word: Announced) -> None:
        """The relay began to bring an object that nobody here asked for yet."""
        self._policies[word.root], self._sizes[word.root] = word.policy, word.size_bytes

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        root = manifest.object_root
        self._policies[root], self._sizes[root] = manifest.policy, manifest.object_size
        try:
            return await self._opened().bring(signed)
        except RelayStuck as stuck:
            self._events.emit("relay_stuck", policy=str(manifest.policy), error=str(stuck))
        path = await self._http.bring(signed, manifest)
        with contextlib.suppress(RelayStuck):  # So that others may have it from here.
            return await self._opened().bring(signed)
        return path

    def received(self) -> Mapping[str, int]:
        progress = self._opened().tally.progress
        by_relay = {root: int(progress.get(root, 0.0) * size) for root, size in self._sizes.items()}
        return {root: max(count, self._http.received().get(root, 0)) for root, count in by_relay.items()}

    async def abandon(self, root: str) -> None:
        await self._drop([root])

    async def forget_before(self, policy: Policy) -> None:
        old = {root for root, named in self._policies.items() if named < policy}
        unknown, self._left = self._left - self._policies.keys(), set()
        await self._drop(sorted(old | unknown))

    async def _drop(self, roots: Sequence[str]) -> None:
        for root in roots:
            self._policies.pop(root, None)
            self._sizes.pop(root, None)
            await self._opened().withdraw(root)
        await self._http.forget(roots)

    def _opened(self) -> RelayClient:
        assert self._relay is not None, "use() comes first"
        return self._relay

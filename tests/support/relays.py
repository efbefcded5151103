"""A run's relays for tests: its keys, small signed objects, and what a relay process is opened with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.plan.model import SEED, Topology
from echo2.broadcast.relay.control import Open
from echo2.broadcast.signing import encode_signed, generate_key, public_key, sign
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.transport.partial import OBJECT_NAME
from echo2.transport.tls import ensure_authority, issue_peer_certificate, new_peer_key, utc_now
from echo2.types import Policy


@dataclass(frozen=True)
class Published:
    """An object as its seed has it."""

    manifest: Manifest
    signed: bytes
    path: Path

    @property
    def root(self) -> str:
        return self.manifest.object_root

    @property
    def content(self) -> bytes:
        return self.path.read_bytes()


@dataclass(frozen=True)
class RunKeys:
    """The keys of a run in a temporary folder."""

    folder: Path
    run_id: str = "run"
    manifest_key: bytes = field(default_factory=generate_key)

    def publish(self, version: int, size_bytes: int, chunk_bytes: int = 64 * 1024, key: bytes = b"") -> Published:
        """Write and sign version ``version``, whose weights follow from it; ``key``: another's than the run's."""
        folder = self.folder / "published" / f"0.{version}"
        bits = np.random.default_rng(version).integers(0, 2**16, size_bytes // 2, dtype=np.uint16)
        manifest = write_snapshot(
            {"w": RawTensor.of(bits, "BF16")}, {}, run_id=self.run_id, policy=Policy(0, version), dtype="bfloat16",
            folder=folder, chunk_size=chunk_bytes,
        )  # fmt: skip
        return Published(manifest, self.sign(manifest, key), folder / OBJECT_NAME)

    def sign(self, manifest: Manifest, key: bytes = b"") -> bytes:
        return encode_signed(sign(encode_manifest(manifest), key or self.manifest_key))

    def opening(self, node_id: str = SEED, seed_port: int = 0, **other: Any) -> Open:
        """What relay ``node_id`` is opened with on loopback; a node when ``seed_port`` is given."""
        now = utc_now()
        authority = ensure_authority(self.folder / "keys", now)
        key, public = new_peer_key()
        folder = self.folder / "relays" / node_id
        folder.mkdir(parents=True, exist_ok=True)
        seed = {"seed_host": "127.0.0.1", "seed_port": seed_port} if seed_port else {}
        settings: dict[str, Any] = {
            "node_id": node_id, "run_id": self.run_id, "manifest_key": public_key(self.manifest_key),
            "authority_pem": authority, "key_pem": key, "host": "127.0.0.1", "port": 0, "folder": str(folder),
            "certificate_pem": issue_peer_certificate(self.folder / "keys", public, node_id, now),
            "topology": Topology.CHAIN,
        }  # fmt: skip
        return Open(**(settings | seed | other))

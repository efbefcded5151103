"""The run's signature on manifests.

Invariant (I6): a manifest that left ``open_signed`` was signed by the holder of the run's private key; the signature is
checked over the bytes as they came, before they are parsed.
"""

from __future__ import annotations

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from echo2.broadcast.manifest import Manifest, SignedManifest
from echo2.broadcast.parse import MAX_MANIFEST_BYTES, parse_manifest
from echo2.errors import IntegrityError

_CONTEXT = b"echo2 snapshot manifest v1\x00"
"""Signed in front of the manifest, so the signature can stand for nothing else the key may sign."""


def generate_key() -> bytes:
    """A fresh private key, [32] bytes. Keep it in a file of mode 0600."""
    return Ed25519PrivateKey.generate().private_bytes_raw()


def public_key(private: bytes) -> bytes:
    """[32] private → [32] public."""
    return Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def sign(manifest: bytes, private: bytes) -> SignedManifest:
    """Sign the manifest's JSON bytes."""
    return SignedManifest(manifest, Ed25519PrivateKey.from_private_bytes(private).sign(_CONTEXT + manifest))


def encode_signed(signed: SignedManifest) -> bytes:
    """The msgpack that travels as ``PolicyNews.manifest``."""
    return msgspec.msgpack.encode(signed)


def open_signed(data: bytes, public: bytes) -> Manifest:
    """Signed manifest bytes → manifest. Raises IntegrityError for a wrong signature or an inconsistent manifest."""
    if len(data) > MAX_MANIFEST_BYTES + 1024:
        raise IntegrityError(f"a signed manifest has at most {MAX_MANIFEST_BYTES + 1024} bytes, got {len(data)}")
    try:
        signed = msgspec.msgpack.decode(data, type=SignedManifest)
        Ed25519PublicKey.from_public_bytes(public).verify(signed.signature, _CONTEXT + signed.manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise IntegrityError(f"the signed manifest could not be read: {error}") from None
    except InvalidSignature:
        raise IntegrityError("the manifest is not signed by this run's key; nothing of it is used") from None
    return parse_manifest(signed.manifest)

"""What a client trusts.

Invariant: a client either verifies the coordinator against the authority that its join string pins, or does not talk to
it; there is no fall-back to an unverified connection (H10).
"""

from __future__ import annotations

import ssl
from hashlib import sha256

from echo2.errors import UserError
from echo2.transport.certificates import (
    BACKDATED,
    CA_CERTIFICATE,
    CA_KEY,
    CA_VALIDITY,
    der_of,
    ensure_authority,
    fingerprint,
    utc_now,
)
from echo2.transport.peers import (
    MAX_KEY_PEM_BYTES,
    PEER_VALIDITY,
    issue_peer_certificate,
    new_peer_key,
    peer_context,
    peer_id_of,
)
from echo2.transport.server_certificate import (
    SERVER_CERTIFICATE,
    SERVER_KEY,
    SERVER_VALIDITY,
    ServerCertificate,
    ensure_certificates,
    issue_server_certificate,
)

__all__ = [
    "BACKDATED",
    "CA_CERTIFICATE",
    "CA_KEY",
    "CA_VALIDITY",
    "MAX_KEY_PEM_BYTES",
    "PEER_VALIDITY",
    "SERVER_CERTIFICATE",
    "SERVER_KEY",
    "SERVER_VALIDITY",
    "ServerCertificate",
    "ensure_authority",
    "ensure_certificates",
    "fingerprint",
    "issue_peer_certificate",
    "issue_server_certificate",
    "new_peer_key",
    "peer_context",
    "peer_id_of",
    "pinned_context",
    "utc_now",
]


def pinned_context(pem: bytes, pinned: str) -> ssl.SSLContext:
    """A client's context that trusts exactly the authority with fingerprint ``pinned``. Raises UserError."""
    try:
        der = der_of(pem)
    except ValueError:
        raise UserError("the coordinator sent no CA certificate; check address and port of the join string") from None
    if sha256(der).hexdigest() != pinned:
        raise UserError(
            f"the coordinator's CA must have the join string's fingerprint {pinned[:16]}…, got "
            f"{sha256(der).hexdigest()[:16]}…; ask for the current join string, or someone is in between"
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=der)
    return context

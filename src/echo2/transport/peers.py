"""Who a relay is, and TLS between relays.

Invariant: relays talk only to holders of a certificate of the run's authority, whose common name is the peer's id; such
a certificate never passes for the coordinator's.
"""

from __future__ import annotations

import re
import ssl
import tempfile
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from echo2.errors import IntegrityError, Malformed, Unauthorised
from echo2.transport.certificates import LEAF_VALIDITY, der_of, issue, key_pem

PEER_VALIDITY = LEAF_VALIDITY
MAX_KEY_PEM_BYTES = 4096
"""A longer public key is cut there, and cannot be read then."""
_PEER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""At most what a common name holds, and nothing that another reader of names could take for structure."""
_PEER_NAME = "peer.echo2.invalid"
"""Alternative name of every peer: verifiers that see one do not compare host names with the common name, which a
worker may have chosen."""


def new_peer_key() -> tuple[bytes, bytes]:
    """Private and public key of a relay, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return key_pem(key), public


def issue_peer_certificate(
    folder: Path, public_key_pem: bytes, peer_id: str, now: datetime, validity: timedelta = PEER_VALIDITY
) -> bytes:
    """A certificate, PEM, by the authority in ``folder`` that says the holder of the key is relay ``peer_id``.

    Raises Malformed for a key or an id that is not what relays have, UserError for a broken authority.
    """
    if not _PEER_ID.fullmatch(peer_id):
        raise Malformed(f"a relay's id has 1 to 64 letters, digits, '.', '_' or '-', got {peer_id[:80]!r}")
    try:
        key = serialization.load_pem_public_key(public_key_pem[:MAX_KEY_PEM_BYTES])
    except (ValueError, UnsupportedAlgorithm):
        raise Malformed("a relay's public key must be a PEM public key") from None
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise Malformed("a relay's public key must be of the elliptic curve P-256")
    usage = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    return issue(folder, peer_id, key, [x509.DNSName(_PEER_NAME)], usage, now, validity)


def peer_context(server: bool, authority_pem: bytes, certificate_pem: bytes, key_pem: bytes) -> ssl.SSLContext:
    """TLS 1.3 between relays: both ends show a certificate of exactly this authority.

    Host names are not compared: who the other is, ``peer_id_of`` says. Raises IntegrityError for parts that cannot be
    read or do not belong together.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        context.num_tickets = 0  # links stay open; a resumed session would not show its certificate again
    try:
        context.load_verify_locations(cadata=der_of(authority_pem))
        with tempfile.NamedTemporaryFile() as file:  # of mode 0600; the library reads keys from files only
            file.write(certificate_pem + b"\n" + key_pem)
            file.flush()
            context.load_cert_chain(file.name)
    except (ValueError, ssl.SSLError):
        raise IntegrityError("a relay needs the run's CA certificate, its own certificate and that one's key") from None
    return context


def peer_id_of(other: ssl.SSLSocket | ssl.SSLObject | bytes) -> str:
    """Id of the relay at the other end of a connection, or of a certificate in DER form. Raises Unauthorised."""
    der = other if isinstance(other, bytes) else other.getpeercert(binary_form=True)
    if der is None:
        raise Unauthorised("a relay must show a certificate of the run's authority; this one showed none")
    try:
        names = x509.load_der_x509_certificate(der).subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    except ValueError:
        names = []
    if len(names) != 1 or not _PEER_ID.fullmatch(str(names[0].value)):
        raise Unauthorised("a relay's certificate must name the relay; this one is not a relay's")
    return str(names[0].value)

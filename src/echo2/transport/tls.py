"""The run's own certificate authority, the certificates it gives out, and what clients and relays trust.

Invariant: a client either verifies the coordinator against the authority that its join string pins, or does not talk to
it; there is no fall-back to an unverified connection (H10). Relays talk only to holders of a certificate of the run's
authority, whose common name is the peer's id; such a certificate never passes for the coordinator's. Private keys are
files of mode 0600 and leave no machine.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from echo2.durable import write_file
from echo2.errors import IntegrityError, Malformed, Unauthorised, UserError

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"

BACKDATED = timedelta(days=1)
"""Certificates begin a day early: a joining machine's clock may be behind ours (H12)."""
CA_VALIDITY = timedelta(days=3650)
SERVER_VALIDITY = timedelta(days=397)
"""What common verifiers accept at most; longer than any run."""
PEER_VALIDITY = SERVER_VALIDITY
MAX_KEY_PEM_BYTES = 4096
"""A longer public key is cut there, and cannot be read then."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_PEER_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""At most what a common name holds, and nothing that another reader of names could take for structure."""
_PEER_NAME = "peer.echo2.invalid"
"""Alternative name of every peer: verifiers that see one do not compare host names with the common name, which a
worker may have chosen."""


def ensure_authority(folder: Path, now: datetime) -> bytes:
    """Make the run's authority in ``folder`` unless it is there; return its certificate, PEM."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / CA_CERTIFICATE).exists():
        _write_authority(folder, now)
    return (folder / CA_CERTIFICATE).read_bytes()


def ensure_certificates(
    folder: Path, hosts: Sequence[str], now: datetime, validity: timedelta = SERVER_VALIDITY
) -> ServerCertificate:
    """Make what is missing of the run's authority and server certificate in ``folder`` and open it.

    hosts: names and addresses that workers dial; loopback is always among them. A certificate that lacks one of them is
    made anew under the same authority. Raises UserError, as ``ServerCertificate`` does.
    """
    ensure_authority(folder, now)
    wanted = {_general_name(host) for host in (*hosts, *_LOOPBACK)}
    if not (folder / SERVER_CERTIFICATE).exists() or not wanted <= _names_in(folder / SERVER_CERTIFICATE):
        issue_server_certificate(folder, hosts, now, validity)
    return ServerCertificate(folder, now)


def issue_server_certificate(
    folder: Path, hosts: Sequence[str], now: datetime, validity: timedelta = SERVER_VALIDITY
) -> None:
    """Replace the server's key and certificate by new ones under the run's authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = [ExtendedKeyUsageOID.SERVER_AUTH]
    names = _names((*hosts, *_LOOPBACK))
    certificate = _issue(folder, "echo2 coordinator", key.public_key(), names, usage, now, validity)
    write_file(folder / SERVER_KEY, _key_pem(key), 0o600)
    write_file(folder / SERVER_CERTIFICATE, certificate)


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
    return _issue(folder, peer_id, key, [x509.DNSName(_PEER_NAME)], usage, now, validity)


def new_peer_key() -> tuple[bytes, bytes]:
    """Private and public key of a relay, PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return _key_pem(key), public


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
        context.load_verify_locations(cadata=_der(authority_pem))
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


class ServerCertificate:
    """The coordinator's TLS context, which follows its files while connections come and go."""

    def __init__(self, folder: Path, now: datetime) -> None:
        """Raises UserError for files that are missing, expired (with the date) or do not belong together."""
        self._certificate, self._key = folder / SERVER_CERTIFICATE, folder / SERVER_KEY
        try:
            self.ca_pem = (folder / CA_CERTIFICATE).read_bytes()
            self._seen = self._stamp()
            _check_pair(self._certificate, self._key, now)
        except FileNotFoundError as error:
            raise UserError(f"{error.filename} must exist for TLS; remove {folder} to have new ones made") from None
        self.context = _server_context(self._certificate, self._key)

    @property
    def fingerprint(self) -> str:
        """What join strings pin."""
        return fingerprint(self.ca_pem)

    def reload(self, now: datetime) -> str:
        """Take up changed files for new connections; return the empty string when nothing changed, else what happened.

        A pair that does not match yet (one file of two replaced), is expired or unreadable leaves the old pair in use.
        """
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return ""
            _check_pair(self._certificate, self._key, now)
            self.context.load_cert_chain(self._certificate, self._key)
        except (UserError, OSError) as error:
            return f"kept the previous certificate: {error}"
        self._seen = stamp
        return f"took up the new certificate {self._certificate}"

    def _stamp(self) -> tuple[tuple[int, int, int], ...]:
        stats = [path.stat() for path in (self._certificate, self._key)]
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in stats)


def fingerprint(pem: bytes) -> str:
    """SHA-256 over the DER form of the first certificate, hexadecimal. Raises ValueError when there is none."""
    return sha256(_der(pem)).hexdigest()


def pinned_context(pem: bytes, pinned: str) -> ssl.SSLContext:
    """A client's context that trusts exactly the authority with fingerprint ``pinned``. Raises UserError."""
    try:
        der = _der(pem)
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


def _names(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Host names and addresses as certificate names, each once."""
    return [_general_name(host) for host in dict.fromkeys(hosts)]


def _issue(
    folder: Path,
    name: str,
    key: ec.EllipticCurvePublicKey,
    alternatives: Sequence[x509.GeneralName],
    usage: Sequence[x509.ObjectIdentifier],
    now: datetime,
    validity: timedelta,
) -> bytes:
    """A certificate, PEM, by the authority in ``folder``. Raises UserError when that one cannot sign."""
    try:
        authority_key = serialization.load_pem_private_key((folder / CA_KEY).read_bytes(), None)
    except (FileNotFoundError, ValueError):
        raise UserError(f"{folder / CA_KEY} must hold the key of {folder / CA_CERTIFICATE}; remove {folder}") from None
    assert isinstance(authority_key, ec.EllipticCurvePrivateKey)
    authority = x509.load_pem_x509_certificate((folder / CA_CERTIFICATE).read_bytes())
    certificate = (
        _builder(name, authority.subject, key, now, validity)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usage), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, SHA256())
    )
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_authority(folder: Path, now: datetime) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "echo2 run authority")])
    certificate = (
        _builder("echo2 run authority", subject, key.public_key(), now, CA_VALIDITY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(_signing_usage(), critical=True)
        .sign(key, SHA256())
    )
    write_file(folder / CA_KEY, _key_pem(key), 0o600)
    write_file(folder / CA_CERTIFICATE, certificate.public_bytes(serialization.Encoding.PEM))


def _builder(
    name: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime, validity: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + validity)
    )


def _signing_usage() -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _names_in(certificate: Path) -> set[x509.GeneralName]:
    try:
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
        return set(parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except ValueError:
        raise UserError(f"{certificate} must be a PEM certificate; remove it to have a new one made") from None
    except x509.ExtensionNotFound:
        return set()


def _check_pair(certificate: Path, key: Path, now: datetime) -> None:
    """Raises UserError when the pair cannot serve now."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
        private = serialization.load_pem_private_key(key.read_bytes(), None)
    except ValueError:
        raise UserError(f"{certificate} and {key} must be a PEM certificate and key; remove both to renew") from None
    if parsed.not_valid_after_utc <= now:
        expired = parsed.not_valid_after_utc.date().isoformat()
        raise UserError(f"the certificate {certificate} expired on {expired}; remove it to have a new one made")
    if private.public_key() != parsed.public_key():
        raise UserError(f"{key} must be the key of {certificate} and is another's; remove both to renew")


def _server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(certificate, key)
    return context


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _der(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def utc_now() -> datetime:
    """Certificates are judged by wall time; nothing else is."""
    return datetime.now(UTC)

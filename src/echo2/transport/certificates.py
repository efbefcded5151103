"""The run's own certificate authority and the certificates it gives out.

Invariant: private keys are files of mode 0600 and leave no machine. Certificates begin a day before they are made, and
time comes from outside (H12).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509.oid import NameOID

from echo2.durable import write_file
from echo2.errors import UserError

CA_CERTIFICATE, CA_KEY = "ca.pem", "ca.key"

BACKDATED = timedelta(days=1)
"""Certificates begin a day early: a joining machine's clock may be behind ours (H12)."""
CA_VALIDITY = timedelta(days=3650)
LEAF_VALIDITY = timedelta(days=397)
"""What common verifiers accept at most; longer than any run."""


def ensure_authority(folder: Path, now: datetime) -> bytes:
    """Make the run's authority in ``folder`` unless it is there; return its certificate, PEM."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not (folder / CA_CERTIFICATE).exists():
        _write_authority(folder, now)
    return (folder / CA_CERTIFICATE).read_bytes()


def issue(
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
    write_file(folder / CA_KEY, key_pem(key), 0o600)
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


def general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def names_of(hosts: Sequence[str]) -> list[x509.GeneralName]:
    """Host names and addresses as certificate names, each once."""
    return [general_name(host) for host in dict.fromkeys(hosts)]


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def fingerprint(pem: bytes) -> str:
    """SHA-256 over the DER form of the first certificate, hexadecimal. Raises ValueError when there is none."""
    return sha256(der_of(pem)).hexdigest()


def der_of(pem: bytes) -> bytes:
    return x509.load_pem_x509_certificate(pem).public_bytes(serialization.Encoding.DER)


def utc_now() -> datetime:
    """Certificates are judged by wall time; nothing else is."""
    return datetime.now(UTC)

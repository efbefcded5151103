"""The certificate that the coordinator shows.

Invariant (H10): a pair that does not match, is expired or cannot be read is never taken up; a good one that replaced
it on disk is, while connections come and go.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from echo2.durable import write_file
from echo2.errors import UserError
from echo2.transport.certificates import (
    CA_CERTIFICATE,
    LEAF_VALIDITY,
    ensure_authority,
    fingerprint,
    general_name,
    issue,
    key_pem,
    names_of,
)

SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"
SERVER_VALIDITY = LEAF_VALIDITY
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def ensure_certificates(
    folder: Path, hosts: Sequence[str], now: datetime, validity: timedelta = SERVER_VALIDITY
) -> ServerCertificate:
    """Make what is missing of the run's authority and server certificate in ``folder`` and open it.

    hosts: names and addresses that workers dial; loopback is always among them. A certificate that lacks one of them is
    made anew under the same authority. Raises UserError, as ``ServerCertificate`` does.
    """
    ensure_authority(folder, now)
    wanted = {general_name(host) for host in (*hosts, *_LOOPBACK)}
    if not (folder / SERVER_CERTIFICATE).exists() or not wanted <= _names_in(folder / SERVER_CERTIFICATE):
        issue_server_certificate(folder, hosts, now, validity)
    return ServerCertificate(folder, now)


def issue_server_certificate(
    folder: Path, hosts: Sequence[str], now: datetime, validity: timedelta = SERVER_VALIDITY
) -> None:
    """Replace the server's key and certificate by new ones under the run's authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    usage = [ExtendedKeyUsageOID.SERVER_AUTH]
    names = names_of((*hosts, *_LOOPBACK))
    certificate = issue(folder, "echo2 coordinator", key.public_key(), names, usage, now, validity)
    write_file(folder / SERVER_KEY, key_pem(key), 0o600)
    write_file(folder / SERVER_CERTIFICATE, certificate)


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

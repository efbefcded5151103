from __future__ import annotations

import contextlib
import os
import ssl
import stat
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from echo2.errors import IntegrityError, Malformed, Unauthorised, UserError
from echo2.transport.tls import (
    CA_KEY,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    ServerCertificate,
    ensure_authority,
    ensure_certificates,
    fingerprint,
    issue_peer_certificate,
    issue_server_certificate,
    new_peer_key,
    peer_context,
    peer_id_of,
    pinned_context,
    utc_now,
)

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)


def certificate_in(folder: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((folder / SERVER_CERTIFICATE).read_bytes())


def test_a_run_makes_its_authority_once_and_keeps_keys_to_itself(tmp_path: Path) -> None:
    first = ensure_certificates(tmp_path / "keys", ["10.1.2.3", "learner.example.org"], NOW)
    again = ensure_certificates(tmp_path / "keys", ["10.1.2.3"], NOW)
    assert first.fingerprint == again.fingerprint == fingerprint(first.ca_pem)
    for name in (CA_KEY, SERVER_KEY):
        assert stat.S_IMODE(os.stat(tmp_path / "keys" / name).st_mode) == 0o600
    names = certificate_in(tmp_path / "keys").extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "learner.example.org" in names.get_values_for_type(x509.DNSName)
    assert "10.1.2.3" in [str(a) for a in names.get_values_for_type(x509.IPAddress)]


def test_h12_certificates_begin_a_day_before_they_are_made(tmp_path: Path) -> None:
    ensure_certificates(tmp_path, [], NOW)
    assert certificate_in(tmp_path).not_valid_before_utc == NOW - timedelta(days=1)


def test_a_new_host_name_gets_a_new_certificate_of_the_same_authority(tmp_path: Path) -> None:
    first = ensure_certificates(tmp_path, ["a.example.org"], NOW)
    serial = certificate_in(tmp_path).serial_number
    second = ensure_certificates(tmp_path, ["b.example.org"], NOW)
    assert certificate_in(tmp_path).serial_number != serial
    assert first.fingerprint == second.fingerprint


def test_h10_an_expired_certificate_is_refused_at_start_with_its_date(tmp_path: Path) -> None:
    ensure_certificates(tmp_path, [], NOW, validity=timedelta(minutes=2))
    with pytest.raises(UserError, match=r"expired on 2026-03-01; remove it"):
        ensure_certificates(tmp_path, [], NOW + timedelta(minutes=3))


def test_a_key_of_another_certificate_and_broken_files_are_the_users_mistake(tmp_path: Path) -> None:
    ensure_certificates(tmp_path / "a", [], NOW)
    ensure_certificates(tmp_path / "b", [], NOW)
    (tmp_path / "a" / SERVER_KEY).write_bytes((tmp_path / "b" / SERVER_KEY).read_bytes())
    with pytest.raises(UserError, match="must be the key of"):
        ServerCertificate(tmp_path / "a", NOW)
    (tmp_path / "b" / SERVER_KEY).write_text("junk")
    with pytest.raises(UserError, match="must be a PEM"):
        ServerCertificate(tmp_path / "b", NOW)
    (tmp_path / "b" / SERVER_KEY).unlink()
    with pytest.raises(UserError, match="must exist"):
        ServerCertificate(tmp_path / "b", NOW)


def test_h10_a_half_replaced_or_expired_pair_keeps_the_old_one_and_a_whole_pair_is_taken_up(tmp_path: Path) -> None:
    server = ensure_certificates(tmp_path, [], NOW)
    assert server.reload(NOW) == ""
    old_certificate = (tmp_path / SERVER_CERTIFICATE).read_bytes()
    issue_server_certificate(tmp_path, [], NOW)
    new_certificate = (tmp_path / SERVER_CERTIFICATE).read_bytes()
    (tmp_path / SERVER_CERTIFICATE).write_bytes(old_certificate)
    assert "kept the previous" in server.reload(NOW)
    (tmp_path / SERVER_CERTIFICATE).write_bytes(new_certificate)
    assert "took up" in server.reload(NOW)
    assert server.reload(NOW) == ""
    issue_server_certificate(tmp_path, [], NOW - timedelta(days=30), validity=timedelta(days=1))
    assert "kept the previous certificate" in server.reload(NOW)
    (tmp_path / SERVER_KEY).unlink()
    assert "kept the previous certificate" in server.reload(NOW)


def test_only_the_pinned_authority_is_trusted(tmp_path: Path) -> None:
    ours = ensure_certificates(tmp_path / "a", [], NOW)
    other = ensure_certificates(tmp_path / "b", [], NOW)
    assert pinned_context(ours.ca_pem, ours.fingerprint).check_hostname
    with pytest.raises(UserError, match="someone is in between"):
        pinned_context(other.ca_pem, ours.fingerprint)
    with pytest.raises(UserError, match="no CA certificate"):
        pinned_context(b"<html>", ours.fingerprint)


@dataclass(frozen=True)
class Peer:
    """A relay's side of TLS; ``now`` is the real time, which is what handshakes go by."""

    authority: bytes
    certificate: bytes
    key: bytes

    def context(self, server: bool) -> ssl.SSLContext:
        return peer_context(server, self.authority, self.certificate, self.key)


def peer(folder: Path, peer_id: str, validity: timedelta = timedelta(days=1)) -> Peer:
    now = utc_now()
    authority = ensure_authority(folder, now)
    key, public = new_peer_key()
    return Peer(authority, issue_peer_certificate(folder, public, peer_id, now, validity), key)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, host: str | None = None) -> tuple[str, str]:
    """Who each end is to the other (client's view first), after a handshake in memory. Raises ssl.SSLError."""
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    with contextlib.suppress(ssl.SSLWantReadError):
        ends[0].read(1)  # a server's refusal of the client's certificate comes after the client's handshake
    return peer_id_of(ends[0]), peer_id_of(ends[1])


def test_two_relays_read_each_others_id_from_the_handshake(tmp_path: Path) -> None:
    dialling, listening = peer(tmp_path, "worker-1f"), peer(tmp_path, "seed")
    assert shake_hands(dialling.context(False), listening.context(True)) == ("seed", "worker-1f")


def test_the_authority_is_made_without_a_server_certificate_and_only_once(tmp_path: Path) -> None:
    first = ensure_authority(tmp_path / "keys", NOW)
    assert ensure_authority(tmp_path / "keys", NOW) == first
    assert sorted(path.name for path in (tmp_path / "keys").iterdir()) == ["ca.key", "ca.pem"]
    assert ensure_certificates(tmp_path / "keys", [], NOW).ca_pem == first


def test_h12_a_peer_certificate_begins_a_day_before_it_is_made(tmp_path: Path) -> None:
    ensure_authority(tmp_path, NOW)
    certificate = x509.load_pem_x509_certificate(issue_peer_certificate(tmp_path, new_peer_key()[1], "w", NOW))
    assert certificate.not_valid_before_utc == NOW - timedelta(days=1)
    assert certificate.not_valid_after_utc > NOW + timedelta(days=300)


def test_a_relay_without_a_certificate_is_refused(tmp_path: Path) -> None:
    listening = peer(tmp_path, "seed")
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname = False
    bare.load_verify_locations(cadata=listening.authority.decode())
    with pytest.raises(ssl.SSLError, match="certificate"):
        shake_hands(bare, listening.context(True))


@pytest.mark.parametrize("is_server_foreign", [True, False])
def test_a_relay_of_another_run_is_refused_whichever_end_it_is(tmp_path: Path, is_server_foreign: bool) -> None:
    ours, other = peer(tmp_path / "ours", "w-1"), peer(tmp_path / "other", "w-2")
    client, server = (ours, other) if is_server_foreign else (other, ours)
    with pytest.raises(ssl.SSLError, match=r"(?i)unknown.ca|certificate verify failed"):
        shake_hands(client.context(False), server.context(True))


@pytest.mark.parametrize("is_server_expired", [True, False])
def test_h10_an_expired_peer_certificate_is_refused_whichever_end_it_is(
    tmp_path: Path, is_server_expired: bool
) -> None:
    expired, valid = peer(tmp_path, "w-1", timedelta(seconds=-60)), peer(tmp_path, "w-2")
    client, server = (valid, expired) if is_server_expired else (expired, valid)
    with pytest.raises(ssl.SSLError, match="expired"):
        shake_hands(client.context(False), server.context(True))


def test_a_peer_certificate_never_passes_for_the_coordinators_host_name(tmp_path: Path) -> None:
    server = ensure_certificates(tmp_path, ["coordinator.example.org"], utc_now())
    impostor = peer(tmp_path, "coordinator.example.org")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile() as file:
        file.write(impostor.certificate + impostor.key)
        file.flush()
        context.load_cert_chain(file.name)
    with pytest.raises(ssl.SSLError, match="Hostname mismatch"):
        shake_hands(pinned_context(server.ca_pem, server.fingerprint), context, "coordinator.example.org")


def test_the_coordinators_own_certificate_is_no_relays(tmp_path: Path) -> None:
    server = ensure_certificates(tmp_path, [], utc_now())
    listening = peer(tmp_path, "seed")
    https = peer_context(
        False, server.ca_pem, (tmp_path / SERVER_CERTIFICATE).read_bytes(), (tmp_path / SERVER_KEY).read_bytes()
    )
    with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
        shake_hands(https, listening.context(True))
    with pytest.raises(Unauthorised, match="not a relay's"):
        peer_id_of(certificate_in(tmp_path).public_bytes(serialization.Encoding.DER))
    with pytest.raises(Unauthorised, match="not a relay's"):
        peer_id_of(b"junk")


@pytest.mark.parametrize("peer_id", ["", "a b", "x/../y", "seed\n", "é", "-w", "w" * 65, "CN=a,O=b"])
def test_a_certificate_is_not_given_to_a_weird_id(tmp_path: Path, peer_id: str) -> None:
    ensure_authority(tmp_path, NOW)
    with pytest.raises(Malformed, match="1 to 64 letters"):
        issue_peer_certificate(tmp_path, new_peer_key()[1], peer_id, NOW)


def test_a_certificate_is_not_given_to_a_key_of_another_kind(tmp_path: Path) -> None:
    ensure_authority(tmp_path, NOW)
    others = [ed25519.Ed25519PrivateKey.generate(), ec.generate_private_key(ec.SECP384R1())]
    for key in others:
        pem = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        with pytest.raises(Malformed, match=r"P-256"):
            issue_peer_certificate(tmp_path, pem, "w", NOW)
    for junk in (b"", b"junk", new_peer_key()[0], b" " * 5000 + new_peer_key()[1]):
        with pytest.raises(Malformed, match="must be a PEM public key"):
            issue_peer_certificate(tmp_path, junk, "w", NOW)


def test_parts_that_do_not_belong_together_are_one_sentence(tmp_path: Path) -> None:
    one, other = peer(tmp_path, "w-1"), peer(tmp_path, "w-2")
    for parts in ((b"junk", one.certificate, one.key), (one.authority, one.certificate, other.key),
                  (one.authority, b"", one.key)):  # fmt: skip
        with pytest.raises(IntegrityError, match="its own certificate and that one's key"):
            peer_context(True, *parts)

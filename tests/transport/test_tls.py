from __future__ import annotations

import os
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509

from echo2.errors import UserError
from echo2.transport.tls import (
    CA_KEY,
    SERVER_CERTIFICATE,
    SERVER_KEY,
    ServerCertificate,
    ensure_certificates,
    fingerprint,
    issue_server_certificate,
    pinned_context,
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

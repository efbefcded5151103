from __future__ import annotations

import msgspec
import pytest
from snapshots import WriteSnapshot

from echo2.broadcast.manifest import SignedManifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.signing import encode_signed, generate_key, open_signed, public_key, sign
from echo2.errors import IntegrityError


def test_a_signed_manifest_opens_with_the_public_key_of_its_run(snapshot_of: WriteSnapshot) -> None:
    manifest, _ = snapshot_of()
    private = generate_key()
    data = encode_signed(sign(encode_manifest(manifest), private))
    assert open_signed(data, public_key(private)) == manifest


def test_a_signature_of_another_run_or_of_other_bytes_is_refused(snapshot_of: WriteSnapshot) -> None:
    manifest, _ = snapshot_of()
    private = generate_key()
    signed = sign(encode_manifest(manifest), private)
    with pytest.raises(IntegrityError, match="not signed by this run's key"):
        open_signed(encode_signed(signed), public_key(generate_key()))
    changed = signed.manifest.replace(b'"run"', b'"ruN"')
    with pytest.raises(IntegrityError, match="not signed by this run's key"):
        open_signed(encode_signed(SignedManifest(changed, signed.signature)), public_key(private))


@pytest.mark.parametrize("data", [b"", b"\x80", b"junk", msgspec.msgpack.encode({"manifest": 1, "signature": 2})])
def test_bytes_that_are_no_signed_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        open_signed(data, public_key(generate_key()))


def test_an_oversized_signed_manifest_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(IntegrityError, match="at most"):
        open_signed(bytes(34 << 20), public_key(generate_key()))


def test_i9_deep_nesting_is_refused() -> None:
    with pytest.raises(IntegrityError, match="could not be read"):
        open_signed(b"\x81\xa1x" + b"\x91" * 100_000, public_key(generate_key()))

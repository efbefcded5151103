from __future__ import annotations

from typing import Any

import msgspec
import pytest
from snapshots import WriteSnapshot

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import (
    MAX_CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_OBJECT_BYTES,
    MIN_CHUNK_BYTES,
    chunk_size_for,
    encode_manifest,
    parse_manifest,
    wire_limit_bytes,
)
from echo2.errors import IntegrityError
from echo2.types import Policy, SnapshotKind

MIB = 1024 * 1024


@pytest.mark.parametrize(
    ("object_size", "chunk"),
    [(1, 128), (32 * MIB, 128), (32 * MIB + 1, 256), (512 * MIB, 256), (512 * MIB + 1, 1024), (2**42, 1024)],
)
def test_larger_objects_travel_in_larger_chunks(object_size: int, chunk: int) -> None:
    assert chunk_size_for(object_size) == chunk * 1024


def resized(manifest: Manifest, size: int, **changes: Any) -> Manifest:
    chunks = ("0" * 64,) * -(-size // manifest.chunk_size)
    return msgspec.structs.replace(manifest, object_size=size, chunks=chunks, **changes)


DELTA: dict[str, Any] = {"kind": SnapshotKind.DELTA, "codec": "delta", "base": Policy(0, 3), "base_root": "0" * 64}
PLANES: dict[str, Any] = {"codec": "planes"}


@pytest.mark.parametrize("changes", [DELTA, PLANES])
@pytest.mark.parametrize("where", ["one byte", "the limit"])
def test_encoded_objects_have_any_size_up_to_a_little_over_the_raw_one(
    snapshot_of: WriteSnapshot, changes: dict[str, Any], where: str
) -> None:
    raw, _ = snapshot_of()
    limit = wire_limit_bytes(raw.object_size)
    manifest = resized(raw, 1 if where == "one byte" else limit, **changes)
    assert parse_manifest(encode_manifest(manifest)) == manifest
    with pytest.raises(IntegrityError, match=f"at most {limit} bytes"):
        parse_manifest(encode_manifest(resized(raw, limit + 1, **changes)))


@pytest.mark.parametrize(
    "changes",
    [
        DELTA | {"base": None},
        DELTA | {"base_root": ""},
        DELTA | {"base_root": "../x"},
        DELTA | {"base": Policy(0, 4)},
        DELTA | {"base": Policy(1, 0)},
        DELTA | {"codec": "planes"},
        DELTA | {"codec": "raw"},
        PLANES | {"base": Policy(0, 3), "base_root": "0" * 64},
        PLANES | {"base_root": "0" * 64},
        {"codec": "delta"},
        {"kind": SnapshotKind.ADAPTER},
        {"kind": SnapshotKind.ADAPTER, "codec": "delta"},
    ],
)
def test_kind_codec_and_base_must_go_together(snapshot_of: WriteSnapshot, changes: dict[str, Any]) -> None:
    raw, _ = snapshot_of(version=4)
    with pytest.raises(IntegrityError):
        parse_manifest(encode_manifest(resized(raw, 2000, **changes)))


@pytest.mark.parametrize(
    ("changes", "must"),
    [
        ({"object_size": 0, "chunks": ()}, "object_size must be in"),
        ({"object_size": MAX_OBJECT_BYTES + 1, "chunk_size": MAX_CHUNK_BYTES}, "object_size must be in"),
        ({"object_size": 2**70}, "could not be read|object_size must be in"),
        ({"chunk_size": MIN_CHUNK_BYTES - 1}, "chunk_size must be in"),
        ({"chunk_size": MAX_CHUNK_BYTES + 1}, "chunk_size must be in"),
        ({"object_size": 2048, "chunk_size": 1024, "chunks": ("0" * 64,)}, "make 2 chunks, got 1"),
        ({"object_size": 2048, "chunk_size": 1024, "chunks": ("0" * 64,) * 3}, "make 2 chunks, got 3"),
        ({"object_size": 2049, "chunk_size": 1024, "chunks": ("0" * 64,) * 2}, "make 3 chunks, got 2"),
    ],
)  # fmt: skip
def test_i9_an_announced_object_has_a_size_within_limits_and_the_chunks_that_follow_from_it(
    snapshot_of: WriteSnapshot, changes: dict[str, Any], must: str
) -> None:
    raw, _ = snapshot_of()
    with pytest.raises(IntegrityError, match=must):
        parse_manifest(encode_manifest(msgspec.structs.replace(raw, **PLANES | changes)))


def test_i9_a_manifest_over_the_limit_is_refused_before_it_is_read() -> None:
    with pytest.raises(IntegrityError, match=f"at most {MAX_MANIFEST_BYTES} bytes"):
        parse_manifest(b"[" * (MAX_MANIFEST_BYTES + 1))


def test_i9_a_manifest_names_a_limited_number_of_tensors(
    snapshot_of: WriteSnapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, _ = snapshot_of()
    monkeypatch.setattr("echo2.broadcast.parse.MAX_TENSORS", len(raw.tensors))
    assert parse_manifest(encode_manifest(raw)) == raw
    monkeypatch.setattr("echo2.broadcast.parse.MAX_TENSORS", len(raw.tensors) - 1)
    with pytest.raises(IntegrityError, match="at most"):
        parse_manifest(encode_manifest(raw))


def test_a_small_object_may_not_claim_tensors_without_end(snapshot_of: WriteSnapshot) -> None:
    raw, _ = snapshot_of()
    grown = [msgspec.structs.replace(t, shape=(2**60,), nbytes=2**61) for t in raw.tensors]
    with pytest.raises(IntegrityError):
        parse_manifest(encode_manifest(resized(raw, 2000, tensors=tuple(grown), **PLANES)))

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from snapshots import FullDisk

from echo2.broadcast.wire import ObjectReader, Packer, write_object
from echo2.errors import DiskFull, IntegrityError

MAGIC = b"magic..1"


def reader_of(folder: Path, data: bytes) -> ObjectReader:
    (folder / "o").write_bytes(MAGIC + data)
    return ObjectReader(folder / "o", len(MAGIC) + len(data), MAGIC)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=st.lists(st.tuples(st.binary(max_size=90), st.binary(max_size=3).map(lambda b: b * 99)), max_size=4))
def test_records_come_back_and_the_object_ends_after_them(tmp_path: Path, records: list[tuple[bytes, bytes]]) -> None:
    packer = Packer()
    write_object(tmp_path / "o", MAGIC, (packer.record(record) for record in records))
    with ObjectReader(tmp_path / "o", (tmp_path / "o").stat().st_size, MAGIC) as reader:
        assert [tuple(reader.record([300, 300])) for _ in records] == records
        reader.end()


def test_noise_is_kept_and_costs_its_lengths_only() -> None:
    noise = bytes((i * i * 7919 >> 7) % 256 ^ (i * 104729 >> 5) % 256 for i in range(200_000))
    assert len(Packer().record([noise])) <= len(noise) + 8


def bomb(plain: int, claimed: int) -> bytes:
    packed = zstandard.ZstdCompressor().compress(bytes(plain))
    return struct.pack("<II", claimed, len(packed)) + packed


UNKNOWN_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(500))
TWO_FRAMES = zstandard.ZstdCompressor().compress(bytes(500)) * 2


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (bomb(1 << 30, 1 << 30), "a stream of at most 1000 bytes claims 1073741824"),
        (bomb(1 << 30, 900), "packed"),
        (bomb(1 << 20, 900), "must unpack to the 900 bytes"),
        (bomb(800, 900), "must unpack to the 900 bytes"),
        (struct.pack("<II", 500, len(UNKNOWN_SIZE)) + UNKNOWN_SIZE, "must unpack to the 500 bytes"),
        (struct.pack("<II", 500, len(TWO_FRAMES)) + TWO_FRAMES, "could not be unpacked"),
        (struct.pack("<II", 900, 20) + bytes(20), "could not be unpacked"),
        (struct.pack("<II", 500, 400) + b"x", "ends within a segment"),
        (struct.pack("<II", 500, 501) + bytes(501), "packed 501"),
        (b"abc", "ends within a segment"),
    ],
)
def test_a_hostile_record_is_refused_in_little_memory(tmp_path: Path, data: bytes, fault: str) -> None:
    with reader_of(tmp_path, data) as reader:
        tracemalloc.start()
        try:
            with pytest.raises(IntegrityError, match=fault):
                reader.record([1000])
            assert tracemalloc.get_traced_memory()[1] < 300_000
        finally:
            tracemalloc.stop()


def test_what_is_no_object_of_the_codec_or_cut_is_refused(tmp_path: Path) -> None:
    (tmp_path / "o").write_bytes(b"anything else")
    with pytest.raises(IntegrityError, match="must begin with"):
        ObjectReader(tmp_path / "o", 13, MAGIC)
    with pytest.raises(IntegrityError, match="it was cut"):
        ObjectReader(tmp_path / "o", 14, MAGIC)
    with pytest.raises(IntegrityError, match="ends within"):
        ObjectReader(tmp_path / "o", 3, MAGIC)


def test_what_follows_the_last_record_is_refused(tmp_path: Path) -> None:
    with reader_of(tmp_path, b"x") as reader, pytest.raises(IntegrityError, match="1 bytes follow"):
        reader.end()


def test_e07_a_full_disk_leaves_no_object_and_the_older_one(tmp_path: Path, full_disk: FullDisk) -> None:
    write_object(tmp_path / "o", MAGIC, [b"old"])
    with full_disk(10), pytest.raises(DiskFull, match="free space"):
        write_object(tmp_path / "o", MAGIC, [b"new record"])
    assert (tmp_path / "o").read_bytes() == MAGIC + b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["o"]

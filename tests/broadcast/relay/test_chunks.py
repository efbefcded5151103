from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.relay.chunks import ChunkFile
from echo2.errors import DiskFull, IntegrityError
from echo2.types import Policy, SnapshotKind

CHUNK = 1024


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def manifest_of(data: bytes) -> Manifest:
    chunks = tuple(blake3(data[first : first + CHUNK]).hexdigest() for first in range(0, len(data), CHUNK))
    root = blake3(data).hexdigest()
    return Manifest(
        run_id="run", policy=Policy(0, 1), kind=SnapshotKind.ANCHOR, base=None, base_root="", codec="raw",
        object_size=len(data), object_root=root, chunk_size=CHUNK, chunks=chunks, decoded_root=root, tensors=(),
        aliases={}, dtype="bfloat16",
    )  # fmt: skip


def read(file: ChunkFile, number: int) -> bytes:
    target = bytearray(file.length(number))
    file.read_into(number, memoryview(target))
    return bytes(target)


def chunk(data: bytes, number: int) -> memoryview:
    return memoryview(data)[number * CHUNK : (number + 1) * CHUNK]


@settings(max_examples=30)
@given(size=st.integers(1, 20 * CHUNK), order=st.randoms(use_true_random=False))
def test_i6_chunks_in_any_order_make_the_object(
    tmp_path_factory: pytest.TempPathFactory, size: int, order: np.random.Generator
) -> None:
    data = content(size)
    file = ChunkFile(tmp_path_factory.mktemp("any") / "object", manifest_of(data))
    numbers = list(range(file.count))
    order.shuffle(numbers)  # type: ignore[arg-type]
    for done, number in enumerate(numbers):
        assert file.missing() == file.count - done
        assert not file.has(number)
        assert file.right(number, chunk(data, number))
        file.put(number, chunk(data, number))
        assert file.has(number)
        assert read(file, number) == chunk(data, number)
    file.seal()
    file.close()
    assert file.path.read_bytes() == data
    assert int.from_bytes(file.holdings, "little") == (1 << file.count) - 1


def test_i6_a_reopened_file_keeps_the_right_chunks_and_only_them(tmp_path: Path) -> None:
    data = content(10 * CHUNK - 100)
    path = tmp_path / "object"
    first = ChunkFile(path, manifest_of(data))
    for number in (1, 4, 5, 9):
        first.put(number, chunk(data, number))
    first.close()
    with path.open("r+b") as file:  # a crash may leave anything anywhere
        file.seek(4 * CHUNK + 7)
        file.write(b"garbage")
    again = ChunkFile(path, manifest_of(data))
    assert [number for number in range(10) if again.has(number)] == [1, 5, 9]
    assert again.missing() == 7
    again.close()


def test_i6_looking_again_finds_what_somebody_else_wrote_and_keeps_what_was_had(tmp_path: Path) -> None:
    data = content(6 * CHUNK)
    file = ChunkFile(tmp_path / "object", manifest_of(data))
    file.put(0, chunk(data, 0))
    other = ChunkFile(tmp_path / "object", manifest_of(data))
    for number in (2, 3):
        other.put(number, chunk(data, number))
    other.close()
    with file.path.open("r+b") as garbage:
        garbage.seek(4 * CHUNK)
        garbage.write(b"garbage")
    file.look_again()
    assert [number for number in range(6) if file.has(number)] == [0, 2, 3]
    assert file.missing() == 3
    file.close()


@pytest.mark.parametrize("size", [0, 3 * CHUNK + 1, 20 * CHUNK])
def test_a_file_of_another_length_gets_the_objects_length(tmp_path: Path, size: int) -> None:
    data = content(10 * CHUNK)
    path = tmp_path / "object"
    path.write_bytes((data + data)[:size])
    file = ChunkFile(path, manifest_of(data))
    assert path.stat().st_size == len(data)
    assert file.missing() == 10 - min(10, size // CHUNK)
    file.close()


def test_i9_what_is_not_the_chunk_is_not_right(tmp_path: Path) -> None:
    data = content(2 * CHUNK + 5)
    file = ChunkFile(tmp_path / "object", manifest_of(data))
    assert file.right(2, chunk(data, 2))
    assert not file.right(2, memoryview(data)[2 * CHUNK : 2 * CHUNK + 4])
    assert not file.right(0, chunk(data, 1))
    assert not file.right(0, memoryview(data)[: CHUNK + 1])
    assert not file.right(3, memoryview(b""))
    assert not file.right(-1, chunk(data, 2))
    assert not file.right(2**32 - 1, chunk(data, 0))
    file.close()


def test_the_space_is_taken_when_the_file_is_made(tmp_path: Path) -> None:
    file = ChunkFile(tmp_path / "object", manifest_of(content(64 * CHUNK)))
    assert os.stat(file.path).st_blocks * 512 >= 64 * CHUNK
    file.close()


@pytest.mark.parametrize("before", [b"", b"earlier"])
def test_a_full_disk_is_a_sentence_and_leaves_nothing_half_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: bytes
) -> None:
    path = tmp_path / "object"
    if before:
        path.write_bytes(before)

    def no_space(descriptor: int, length: int) -> None:
        os.ftruncate(descriptor, length // 2)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("echo2.broadcast.relay.chunks.allocate", no_space)
    with pytest.raises(DiskFull, match="disk is full; free space there"):
        ChunkFile(path, manifest_of(content(4 * CHUNK)))
    assert path.exists() == bool(before)
    assert not before or path.read_bytes() == before


def test_a_chunk_that_could_not_be_written_is_not_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = content(4 * CHUNK)
    file = ChunkFile(tmp_path / "object", manifest_of(data))

    def no_space(descriptor: int, view: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", no_space)
        with pytest.raises(DiskFull):
            file.put(1, chunk(data, 1))
    assert not file.has(1)
    file.put(1, chunk(data, 1))
    assert file.has(1)
    file.close()


def test_a_chunk_put_twice_counts_once(tmp_path: Path) -> None:
    data = content(2 * CHUNK)
    file = ChunkFile(tmp_path / "object", manifest_of(data))
    file.put(1, chunk(data, 1))
    file.put(1, chunk(data, 1))
    assert file.missing() == 1
    with pytest.raises(IntegrityError, match="still lacks 1 of 2"):
        file.seal()
    file.close()


def test_what_was_read_outlives_close_removal_and_truncation(tmp_path: Path) -> None:
    data = content(2 * CHUNK)
    file = ChunkFile(tmp_path / "object", manifest_of(data))
    file.put(0, chunk(data, 0))
    taken = read(file, 0)
    os.truncate(file.path, 10)
    with pytest.raises(IntegrityError, match="cut short"):
        read(file, 0)
    file.close(delete=True)
    file.close(delete=True)
    assert taken == chunk(data, 0)
    assert not file.path.exists()
    for use in (lambda: read(file, 0), lambda: file.put(0, chunk(data, 0))):
        with pytest.raises(OSError, match="is closed"):
            use()


def test_closing_waits_for_the_read_under_way_and_its_descriptor_is_never_another_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content(2 * CHUNK)
    file = ChunkFile(tmp_path / "object", manifest_of(data))
    file.put(1, chunk(data, 1))
    inside, go_on = threading.Event(), threading.Event()
    real = os.preadv

    def slow(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        inside.set()
        assert go_on.wait(10)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr("os.preadv", slow)
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append(read(file, 1)))
    reader.start()
    assert inside.wait(10)
    file.close(delete=True)
    (tmp_path / "other").write_bytes(bytes(4 * CHUNK))
    with (tmp_path / "other").open("rb"):  # would get the descriptor's number if it were free
        go_on.set()
        reader.join(10)
    assert seen == [chunk(data, 1)]
    with pytest.raises(OSError, match="is closed"):
        read(file, 1)


def test_many_threads_may_put_and_read_at_once(tmp_path: Path) -> None:
    data = content(256 * CHUNK)
    file = ChunkFile(tmp_path / "object", manifest_of(data))
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, 256, 4):
            file.put(number, chunk(data, number))
            if read(file, number) != chunk(data, number):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert file.missing() == 0 and not wrong
    file.seal()
    file.close()
    assert file.path.read_bytes() == data


def test_a_whole_file_is_served_as_it_lies_and_never_removed(tmp_path: Path) -> None:
    data = content(9 * CHUNK + 1)
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    path.chmod(0o444)
    file = ChunkFile.whole(path, manifest_of(data))
    assert file.missing() == 0
    assert b"".join(read(file, number) for number in range(file.count)) == data
    file.close(delete=True)
    assert path.read_bytes() == data


def test_a_whole_file_of_the_wrong_size_is_refused(tmp_path: Path) -> None:
    data = content(3 * CHUNK)
    (tmp_path / "object").write_bytes(data[:-1])
    with pytest.raises(IntegrityError, match="must have the object's 3072 bytes, got 3071"):
        ChunkFile.whole(tmp_path / "object", manifest_of(data))
    with pytest.raises(FileNotFoundError):
        ChunkFile.whole(tmp_path / "absent", manifest_of(data))

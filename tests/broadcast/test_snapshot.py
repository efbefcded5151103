from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize
from snapshots import FullDisk, WriteSnapshot

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest, parse_manifest
from echo2.broadcast.snapshot import RawTensor, load_manifest, read_tensors, verify_snapshot, write_snapshot
from echo2.errors import DiskFull, IntegrityError
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME, PARTIAL, folder_name
from echo2.types import Policy, SnapshotKind

WIDTH = {"BOOL": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I64": 8}


@st.composite
def raw_tensors(draw: st.DrawFn) -> RawTensor:
    dtype = draw(st.sampled_from(sorted(WIDTH)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    length = int(np.prod(shape)) * WIDTH[dtype]
    return RawTensor(dtype, shape, memoryview(draw(st.binary(min_size=length, max_size=length))))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8), raw_tensors())
)
def test_a_snapshot_of_any_tensors_reads_back_and_is_a_safetensors_file(
    tensors: dict[str, RawTensor], tmp_path: Path
) -> None:
    folder = tmp_path / "s"
    written = write_snapshot(
        tensors, {}, run_id="r", policy=Policy(0, 0), dtype="mixed", folder=folder, chunk_size=1024
    )
    manifest = load_manifest(folder)
    assert manifest == written
    verify_snapshot(folder, manifest)
    ours = {name: (dtype, shape, bytes(data)) for name, dtype, shape, data in read_tensors(folder, manifest)}
    assert ours == {name: (t.dtype, t.shape, bytes(t.data)) for name, t in tensors.items()}
    reference = {name: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for name, t in deserialize(object_of(folder))}
    assert reference == ours


def object_of(folder: Path) -> bytes:
    return (folder / OBJECT_NAME).read_bytes()


def test_the_same_tensors_in_any_order_make_the_same_bytes(tmp_path: Path) -> None:
    tensors = {n: RawTensor.of(np.arange(7, dtype=np.float32) * i) for i, n in enumerate("cab")}
    for name, order in (("x", tensors), ("y", dict(sorted(tensors.items())))):
        write_snapshot(order, {}, run_id="r", policy=Policy(0, 0), dtype="float32", folder=tmp_path / name)
    for file in (OBJECT_NAME, MANIFEST_NAME):
        assert (tmp_path / "x" / file).read_bytes() == (tmp_path / "y" / file).read_bytes()


def test_the_decoded_root_depends_on_tensors_and_not_on_chunks(tmp_path: Path) -> None:
    tensors = {"a": RawTensor.of(np.arange(5000, dtype=np.float32)), "scalar": RawTensor.of(np.float32(1).reshape(()))}
    roots = set()
    for chunk in (1024, 4096):
        manifest = write_snapshot(
            tensors, {}, run_id=str(chunk), policy=Policy(0, 0), dtype="float32", folder=tmp_path / "s",
            chunk_size=chunk,
        )  # fmt: skip
        roots.add((manifest.decoded_root, manifest.object_root))
    assert len(roots) == 1


def test_e01_tied_tensors_are_stored_once_and_recorded(snapshot_of: WriteSnapshot) -> None:
    manifest, folder = snapshot_of()
    assert manifest.aliases == {"head": "w"}
    assert [name for name, *_ in read_tensors(folder, manifest)] == ["b", "w"]


def test_e12_a_tensor_wider_than_the_declared_type_is_refused(tmp_path: Path) -> None:
    tensors = {"w": RawTensor.of(np.ones(2, np.float32))}
    with pytest.raises(IntegrityError, match="F32 in a policy declared bfloat16; cast it to BF16"):
        write_snapshot(tensors, {}, run_id="r", policy=Policy(0, 0), dtype="bfloat16", folder=tmp_path / "s")


@pytest.mark.parametrize("where", [8, 200, -1])
def test_i6_one_flipped_bit_anywhere_is_found(snapshot_of: WriteSnapshot, where: int) -> None:
    manifest, folder = snapshot_of()
    data = bytearray(object_of(folder))
    data[where] ^= 1
    (folder / OBJECT_NAME).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"snapshot 0\.4"):
        verify_snapshot(folder, manifest)


def test_a_folder_without_a_manifest_is_no_snapshot(snapshot_of: WriteSnapshot) -> None:
    _, folder = snapshot_of()
    (folder / MANIFEST_NAME).unlink()
    with pytest.raises(IntegrityError, match="no complete snapshot"):
        load_manifest(folder)


@pytest.mark.parametrize("room", ["half the object", "the object and half the manifest", "nothing"])
def test_e07_a_full_disk_leaves_the_previous_snapshot_and_the_next_attempt_works(
    snapshot_of: WriteSnapshot, full_disk: FullDisk, room: str
) -> None:
    first, folder = snapshot_of(version=4, name="x")
    size = first.object_size
    bytes_left = {"nothing": 0, "half the object": size // 2, "the object and half the manifest": size + 100}[room]
    for _ in range(2):  # the second failure meets what the first left behind
        with full_disk(bytes_left), pytest.raises(DiskFull, match="free space"):
            snapshot_of(version=5, name="x")
    verify_snapshot(folder, load_manifest(folder))
    assert not (folder.parent / "0.5").exists()
    second, folder = snapshot_of(version=5, name="x")
    verify_snapshot(folder, second)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["0.4", "0.5"]


WRITE_FOR_EVER = """
import sys
from pathlib import Path
import numpy as np
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.types import Policy
version = int(sys.argv[2])
while True:
    tensors = {"w": RawTensor.of(np.full(200_000, version, np.uint16), "BF16")}
    folder = Path(sys.argv[1]) / f"0.{version}"
    write_snapshot(tensors, {}, run_id="r", policy=Policy(0, version), dtype="bfloat16", folder=folder)
    print(version, flush=True)
    version += 1
"""


@pytest.mark.integration
def test_e05_a_publisher_killed_at_any_moment_leaves_whole_snapshots_only(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    newest = -1
    for life in range(3):  # each goes on beside what the one before was in the middle of
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), str(newest + 1)],
            stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        with writer:
            assert writer.stdout is not None
            for _ in range(3 + life):
                newest = int(writer.stdout.readline())
            time.sleep(0.0015 * life)  # somewhere inside the next write
            writer.kill()
            newest = max([newest, *(int(line) for line in writer.stdout)])
        folders = [path for path in tmp_path.iterdir() if not path.name.endswith(PARTIAL)]
        assert {f"0.{version}" for version in range(newest + 1)} <= {path.name for path in folders}
        for folder in folders:
            verify_snapshot(folder, load_manifest(folder))


def test_writing_a_version_again_replaces_the_folder(snapshot_of: WriteSnapshot) -> None:
    snapshot_of(elements=10)
    manifest, folder = snapshot_of(elements=3000)
    verify_snapshot(folder, load_manifest(folder))
    assert load_manifest(folder) == manifest


CHANGES: dict[str, dict[str, Any]] = {
    "negative version": {"policy": Policy(0, -1)},
    "a chunk too few": {"chunks": ()},
    "chunk size of one byte": {"chunk_size": 1},
    "endless chunk": {"chunk_size": 2**40},
    "size that does not add up": {"object_size": 6001},
    "absurd size": {"object_size": 2**62},
    "hash that is a path": {"object_root": "../../etc/passwd"},
    "another decoded root": {"decoded_root": "0" * 64},
    "alias of nothing": {"aliases": {"head": "v"}},
    "alias that hides a tensor": {"aliases": {"w": "b"}},
    "unknown codec": {"codec": "pickle"},
    "delta without a base": {"kind": SnapshotKind.DELTA},
    "undeclared dtype": {"dtype": "float32"},
    "endless run id": {"run_id": "r" * 1000},
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_manifest_that_does_not_add_up_is_refused(snapshot_of: WriteSnapshot, kind: str) -> None:
    manifest, _ = snapshot_of()
    changed: Manifest = msgspec.structs.replace(manifest, **CHANGES[kind])
    with pytest.raises(IntegrityError):
        parse_manifest(encode_manifest(changed))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b"\xff", b"[" * 100_000, b" " * (33 << 20)])
def test_bytes_that_are_no_manifest_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        parse_manifest(data)


@pytest.mark.parametrize("version", ['"../v9"', '"9"', "1.5", "true", "null", "-1", "1e99"])
def test_e03_a_version_that_is_no_number_never_becomes_a_folder(snapshot_of: WriteSnapshot, version: str) -> None:
    manifest, _ = snapshot_of()
    data = encode_manifest(manifest).replace(b'"policy":[0,4]', b'"policy":[0,%s]' % version.encode())
    with pytest.raises(IntegrityError):
        parse_manifest(data)


def test_a_folder_is_named_by_two_integers_only() -> None:
    assert folder_name(Policy(0, 4)) == "0.4"
    for policy in (Policy(0, "../v9"), Policy(-1, 0), Policy(0, True)):  # type: ignore[arg-type]
        with pytest.raises(Exception, match="two integers"):
            folder_name(policy)


def test_files_are_readable_by_others_and_nothing_is_left_beside_them(snapshot_of: WriteSnapshot) -> None:
    _, folder = snapshot_of()
    assert sorted(os.listdir(folder)) == [MANIFEST_NAME, OBJECT_NAME]
    assert os.listdir(folder.parent) == ["0.4"]

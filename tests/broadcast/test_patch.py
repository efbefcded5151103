from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from snapshots import FullDisk

from echo2.broadcast.pack import pack_directory, verify_directory
from echo2.broadcast.parse import roots_of
from echo2.broadcast.patch import ENDING, PatchHead, apply_patch, read_head, write_patch
from echo2.errors import DiskFull, IntegrityError, UserError
from echo2.transport.messages import AssetFile
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy, SnapshotKind

Tensors = Mapping[str, NDArray[Any]]
WEIGHTS: Tensors = {
    "model.embed_tokens.weight": np.linspace(-1, 1, 3000, dtype=np.float32).reshape(100, 30),
    "steps": np.arange(5),
    "scalar": np.array(2.5, np.float16),
}
STEPPED = {name: np.asarray(value + (value == value.flat[0]).astype(value.dtype)) for name, value in WEIGHTS.items()}


def model(folder: Path, tensors: Tensors, *, shards: int = 1, files: Mapping[str, str] = {}) -> Path:
    folder.mkdir()
    for name, text in ({"config.json": '{"tie_word_embeddings": true}', "tokenizer.json": "{}"} | dict(files)).items():
        (folder / name).write_text(text)
    if shards == 1:
        save_file(dict(tensors), folder / OBJECT_NAME)
        return folder
    index = {name: f"model-{number % shards}.safetensors" for number, name in enumerate(sorted(tensors))}
    for shard in set(index.values()):
        save_file({name: tensors[name] for name in tensors if index[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def small_files(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix == ".json" and "manifest" not in path.name
    }


@pytest.mark.parametrize("base", ["plain", "sharded", "packed"])
@pytest.mark.parametrize("new", ["plain", "sharded", "packed"])
def test_applying_a_patch_gives_the_packed_newer_model(tmp_path: Path, base: str, new: str) -> None:
    folders = []
    for kind, name, tensors in ((base, "a", WEIGHTS), (new, "b", STEPPED)):
        folder = model(tmp_path / name, tensors, shards=2 if kind == "sharded" else 1)
        if kind == "packed":
            pack_directory(folder, tmp_path / f"{name}.packed")
            folder = tmp_path / f"{name}.packed"
        folders.append(folder)
    head = write_patch(*folders, tmp_path / "patch")
    assert (head.manifest.kind, head.why, head.files) == (SnapshotKind.DELTA, "", ())
    made = apply_patch(folders[0], tmp_path / "patch", tmp_path / "out")
    assert verify_directory(tmp_path / "out") == made
    assert made.policy == Policy(0, 1)
    wanted = pack_directory(folders[1], tmp_path / "wanted")
    assert (made.object_root, made.aliases, made.dtype) == (wanted.object_root, wanted.aliases, wanted.dtype)
    assert small_files(tmp_path / "out") == small_files(tmp_path / "wanted")


def test_small_files_that_differ_travel_in_the_patch(tmp_path: Path) -> None:
    model(tmp_path / "a", WEIGHTS, files={"only_a.txt": "a"})
    model(tmp_path / "b", STEPPED, files={"tokenizer.json": '{"new": 1}', "chat_template.jinja": "new"})
    head = write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    assert [asset.name for asset in head.files] == ["chat_template.jinja", "tokenizer.json"]
    apply_patch(tmp_path / "a", tmp_path / "patch", tmp_path / "out")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"new": 1}'
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "new"
    assert (tmp_path / "out" / "only_a.txt").read_text() == "a"


@pytest.mark.parametrize("change", ["all weights", "a tensor more"])
def test_a_patch_with_an_anchor_says_why_and_applies_to_any_base(tmp_path: Path, change: str) -> None:
    random = np.random.default_rng(0)
    old, new = ({"w": random.standard_normal(5000).astype(np.float16)} for _ in range(2))
    if change == "a tensor more":
        new = old | {"v": old["w"]}
    model(tmp_path / "a", old)
    model(tmp_path / "b", new, files={"tokenizer.json": "[]"})
    model(tmp_path / "other", WEIGHTS, files={"of_other.txt": ""})
    head = write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    assert head.manifest.kind is SnapshotKind.ANCHOR
    assert (
        head.why
        == {
            "all weights": "a delta would be larger",
            "a tensor more": "the tensors have other names, types or shapes",
        }[change]
    )
    made = apply_patch(tmp_path / "other", tmp_path / "patch", tmp_path / "out")
    assert made.object_root == pack_directory(tmp_path / "b", tmp_path / "wanted").object_root
    assert small_files(tmp_path / "out") == small_files(tmp_path / "b")
    assert not (tmp_path / "out" / "of_other.txt").exists()


@pytest.fixture
def patch(tmp_path: Path) -> Path:
    """A delta from model ``a`` to ``b``, which carries one file."""
    model(tmp_path / "a", WEIGHTS)
    model(tmp_path / "b", STEPPED, files={"tokenizer.json": "[]"})
    write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    return tmp_path / "patch"


def test_another_base_is_the_users_mistake_and_nothing_is_written(
    tmp_path: Path, patch: Path, full_disk: FullDisk
) -> None:
    with (
        full_disk(0),
        pytest.raises(UserError, match=r"b is not what .*patch was made from: the delta to 0\.1 applies"),
    ):
        apply_patch(tmp_path / "b", patch, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


def test_wrong_paths_are_the_users_mistake(tmp_path: Path, patch: Path) -> None:
    with pytest.raises(UserError, match="must not exist yet"):
        apply_patch(tmp_path / "a", patch, tmp_path / "b")
    with pytest.raises(UserError, match="no such file"):
        apply_patch(tmp_path / "a", tmp_path / "absent", tmp_path / "out")
    with pytest.raises(UserError, match="no such directory"):
        apply_patch(tmp_path / "absent", patch, tmp_path / "out")
    with pytest.raises(UserError, match="must not exist yet"):
        write_patch(tmp_path / "a", tmp_path / "b", patch)
    with pytest.raises(UserError, match="no such directory"):
        write_patch(tmp_path / "a", tmp_path / "absent", tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "patch"]


def test_no_cut_and_no_flipped_bit_of_a_patch_gets_through(tmp_path: Path, patch: Path) -> None:
    data = patch.read_bytes()
    wanted = pack_directory(tmp_path / "b", tmp_path / "wanted")
    for at in {*range(0, len(data), 1 + len(data) // 120), *range(len(data) - 14, len(data))}:
        for damaged in (data[:at], data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :], data + b"x"):
            patch.write_bytes(damaged)
            try:
                made = apply_patch(tmp_path / "a", patch, tmp_path / "out")
            except (IntegrityError, UserError):
                assert not list(tmp_path.glob("out*"))
            else:  # a label such as the run's name, which nothing but a signature protects
                assert made.decoded_root == wanted.decoded_root
                shutil.rmtree(tmp_path / "out")


def with_head(patch: Path, **changes: Any) -> None:
    """Rewrite the patch's head; what precedes it stays."""
    head = read_head(patch)
    before = head.manifest.object_size + sum(asset.size for asset in head.files)
    text = msgspec.json.encode(msgspec.structs.replace(head, **changes))
    patch.write_bytes(patch.read_bytes()[:before] + text + len(text).to_bytes(4, "little") + ENDING)


def carried(name: str, size: int = 2) -> tuple[AssetFile, ...]:
    return (AssetFile(name, size, "0" * 64),)


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        (carried("../../x.json"), "an asset's name"),
        (carried("x.py"), "may carry"),
        (carried("manifest.json"), "may carry"),
        (carried("model.safetensors.index.json"), "may carry"),
        (carried("x.json") * 2, "each once"),
        (tuple(AssetFile(f"{i}.json", 0, "0" * 64) for i in range(65)), "may carry 64"),
        (carried("x.json", -2), "must have at most"),
        (carried("x.json", 2**50), "must have at most"),
        (carried("x.json", 3), "bytes that its head adds up to"),
        (carried("x.json"), "its file x.json is damaged"),
    ],
)
def test_e03_a_patch_writes_small_files_of_a_model_only(
    tmp_path: Path, patch: Path, files: tuple[AssetFile, ...], fault: str
) -> None:
    with_head(patch, files=files)
    with pytest.raises(IntegrityError, match=fault):
        apply_patch(tmp_path / "a", patch, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x" * 5,
        b"x" * 500,
        (0).to_bytes(4, "little") + ENDING,
        (2**32 - 1).to_bytes(4, "little") + ENDING,
        b"{}" + (2).to_bytes(4, "little") + ENDING,
        b"[" * 10**5 + (10**5).to_bytes(4, "little") + ENDING,
    ],
)
def test_a_file_that_is_no_patch_is_refused_in_little_memory(tmp_path: Path, data: bytes) -> None:
    model(tmp_path / "a", WEIGHTS)
    (tmp_path / "patch").write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError, match="patch"):
            apply_patch(tmp_path / "a", tmp_path / "patch", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


def test_e04_a_patch_whose_tensors_would_fill_the_disk_is_refused_at_once(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in "ab":
        model(tmp_path / name, {"w": random.standard_normal(5000)})
    head = write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    entry = head.manifest.tensors[0]
    grown = msgspec.structs.replace(entry, shape=(2**38,), nbytes=2**41)
    manifest = msgspec.structs.replace(head.manifest, tensors=(grown,), decoded_root=roots_of([grown]))
    with_head(tmp_path / "patch", manifest=manifest)
    tracemalloc.start()
    try:
        with pytest.raises(DiskFull, match="must have room"):
            apply_patch(tmp_path / "a", tmp_path / "patch", tmp_path / "out")
        assert tracemalloc.get_traced_memory()[1] < 2e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("room", [0, 40, 500])
def test_e07_a_full_disk_leaves_no_patch(tmp_path: Path, full_disk: FullDisk, room: int) -> None:
    model(tmp_path / "a", WEIGHTS)
    model(tmp_path / "b", STEPPED)
    with full_disk(room), pytest.raises(DiskFull, match="free space"):
        write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", ["header", "first tensor", "last tensor"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_i6_a_damaged_snapshot_is_found_while_it_is_compared_and_leaves_no_patch(
    tmp_path: Path, side: str, where: str
) -> None:
    for name, tensors in (("a", WEIGHTS), ("b", STEPPED)):
        pack_directory(model(tmp_path / f"{name}.model", tensors), tmp_path / name)
    header = int.from_bytes((tmp_path / side / OBJECT_NAME).read_bytes()[:8], "little")
    flip(tmp_path / side / OBJECT_NAME, {"header": 20, "first tensor": 8 + header, "last tensor": -1}[where])
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(IntegrityError, match=rf"/{side}(/model.safetensors)?: (tensor '\w+'|the header)"):
        write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "new" / "patch")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("change", ["all weights", "a tensor more"])
def test_i6_a_damaged_snapshot_makes_no_patch_with_an_anchor_either(tmp_path: Path, change: str) -> None:
    random = np.random.default_rng(0)
    old, new = ({"w": random.standard_normal(50_000).astype(np.float16)} for _ in range(2))
    if change == "a tensor more":
        new = old | {"v": old["w"]}
    for name, tensors in (("a", old), ("b", new)):
        pack_directory(model(tmp_path / f"{name}.model", tensors), tmp_path / name)
    assert write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "good").why
    flip(tmp_path / "b" / OBJECT_NAME, -1)
    with pytest.raises(IntegrityError, match="/b: tensor 'w' must have the bytes that were hashed before"):
        write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    assert not list(tmp_path.glob("patch*"))


def test_what_was_compared_with_a_snapshots_hashes_is_what_the_patch_was_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each byte is read once: a second reading could see other bytes."""
    for name, tensors in (("a", WEIGHTS), ("b", STEPPED)):
        pack_directory(model(tmp_path / f"{name}.model", tensors), tmp_path / name)
    read: list[tuple[int, int]] = []
    real = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], at: int) -> int:
        count = real(descriptor, buffers, at)
        read.append((descriptor, count))
        return count

    monkeypatch.setattr("os.preadv", preadv)
    monkeypatch.setattr("echo2.broadcast.delta.estimated_bytes", lambda new: new.body.nbytes)
    write_patch(tmp_path / "a", tmp_path / "b", tmp_path / "patch")
    body = sum(value.nbytes for value in WEIGHTS.values())
    assert sum(count for _, count in read) == 2 * body


def test_the_head_reads_back(tmp_path: Path, patch: Path) -> None:
    head = read_head(patch)
    assert isinstance(head, PatchHead)
    assert [(asset.name, asset.size) for asset in head.files] == [("tokenizer.json", 2)]

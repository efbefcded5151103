from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hostile import HOSTILE
from safetensors.numpy import load_file, save_file
from snapshots import FullDisk

from echo2.broadcast.pack import pack_directory, verify_directory
from echo2.errors import DiskFull, IntegrityError, UserError
from echo2.transport.partial import OBJECT_NAME

EMBEDDING = np.arange(6, dtype=np.float32).reshape(3, 2)


def model(folder: Path, shards: list[dict[str, np.ndarray]], *, tied: bool = False) -> Path:  # type: ignore[type-arg]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": tied}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.exe").write_text("not copied")
    if len(shards) == 1:
        save_file(shards[0], folder / OBJECT_NAME)
        return folder
    index = {}
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"model-{i}.safetensors")
        index |= dict.fromkeys(shard, f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


def test_one_file_or_many_pack_to_the_same_weights(tmp_path: Path) -> None:
    a, b = {"a": np.ones(3, np.float32)}, {"b": np.arange(4, dtype=np.int64), "c": np.zeros((0, 2), np.float32)}
    whole = pack_directory(model(tmp_path / "one", [a | b]), tmp_path / "x")
    parts = pack_directory(model(tmp_path / "two", [a, b]), tmp_path / "y")
    assert whole == parts
    assert verify_directory(tmp_path / "y") == parts
    assert whole.dtype == "float32"
    loaded = load_file(tmp_path / "x" / OBJECT_NAME)
    assert {n: t.tolist() for n, t in loaded.items()} == {n: t.tolist() for n, t in (a | b).items()}
    names = sorted(path.name for path in (tmp_path / "y").iterdir())
    assert names == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]


def test_a_packed_directory_packs_again_to_the_same_snapshot(tmp_path: Path) -> None:
    first = pack_directory(model(tmp_path / "m", [{"a": np.ones(3, np.float32)}]), tmp_path / "x")
    assert pack_directory(tmp_path / "x", tmp_path / "y") == first


@pytest.mark.parametrize("head", ["absent", "equal", "different"])
def test_e01_a_tied_head_is_an_alias_and_a_different_one_is_kept(tmp_path: Path, head: str) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING}
    if head != "absent":
        tensors["lm_head.weight"] = EMBEDDING + (head == "different")
    manifest = pack_directory(model(tmp_path / "m", [tensors], tied=True), tmp_path / "x")
    if head == "different":
        assert manifest.aliases == {}
        assert len(manifest.tensors) == 2
    else:
        assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
        assert len(manifest.tensors) == 1


def test_untied_models_keep_equal_tensors_apart(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": EMBEDDING, "lm_head.weight": EMBEDDING.copy()}
    manifest = pack_directory(model(tmp_path / "m", [tensors], tied=False), tmp_path / "x")
    assert manifest.aliases == {}
    assert len(manifest.tensors) == 2


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "x\0", "a\\b", 3, None])
def test_e03_an_index_that_names_a_path_is_refused(tmp_path: Path, name: object) -> None:
    save_file({"a": EMBEDDING}, tmp_path / "secret.safetensors")
    folder = model(tmp_path / "m", [{"a": EMBEDDING}, {}])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match="must name safetensors files beside it"):
        pack_directory(folder, tmp_path / "x")
    assert not list(tmp_path.glob("x*"))


def test_e03_a_link_out_of_the_directory_is_refused_and_a_hub_cache_is_not(tmp_path: Path) -> None:
    folder = model(tmp_path / "hub" / "models--x" / "snapshots" / "revision", [{"a": EMBEDDING}, {"b": EMBEDDING}])
    blobs = hub_cache(folder)
    pack_directory(folder, tmp_path / "x")
    for number, name in enumerate(("model-0.safetensors", "tokenizer.json", "config.json")):
        (blobs / name).rename(tmp_path / name)
        (folder / name).unlink()
        (folder / name).symlink_to(tmp_path / name)
        with pytest.raises(UserError, match=f"{name} must not lead out"):
            pack_directory(folder, tmp_path / f"y{number}")
        (folder / name).unlink()
        (folder / name).write_bytes((tmp_path / name).read_bytes())
    assert not list(tmp_path.glob("y*"))


def hub_cache(folder: Path) -> Path:
    """Move the files of snapshots/<revision>, the folder, where a hub cache has them; return the folder of blobs."""
    blobs = folder.parent.parent / "blobs"
    blobs.mkdir()
    for path in list(folder.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(Path("..", "..", "blobs", path.name))
    return blobs


def test_what_is_no_model_directory_or_already_there_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        pack_directory(tmp_path / "absent", tmp_path / "x")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="convert the weights"):
        pack_directory(tmp_path / "empty", tmp_path / "x")
    with pytest.raises(UserError, match="must not exist"):
        pack_directory(model(tmp_path / "m", [{"a": EMBEDDING}]), tmp_path / "empty")
    with pytest.raises(UserError, match="it has no manifest"):
        verify_directory(tmp_path / "empty")


@pytest.mark.parametrize("kind", HOSTILE)
def test_e04_a_broken_file_is_named_and_nothing_is_made_or_allocated(tmp_path: Path, kind: str) -> None:
    folder = model(tmp_path / "m", [{"a": EMBEDDING}])
    (folder / OBJECT_NAME).write_bytes(HOSTILE[kind])
    tracemalloc.start()
    try:
        with pytest.raises(UserError, match=r"m/model\.safetensors: .*; copy or download it again"):
            pack_directory(folder, tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 10e6
    finally:
        tracemalloc.stop()
    assert not (tmp_path / "x").exists()


def test_nothing_of_an_earlier_attempt_gets_into_a_snapshot(tmp_path: Path) -> None:
    left = tmp_path / "x.partial"
    left.mkdir()
    (left / "stale.json").write_text("{}")
    pack_directory(model(tmp_path / "m", [{"a": np.ones(3, np.float32)}]), tmp_path / "x")
    names = sorted(path.name for path in (tmp_path / "x").iterdir())
    assert names == ["config.json", "manifest.json", "model.safetensors", "tokenizer.json"]


@pytest.mark.parametrize("room", [0, 40, 500])
def test_e07_a_full_disk_leaves_nothing_of_a_snapshot_nor_the_folders_made_for_it(
    tmp_path: Path, full_disk: FullDisk, room: int
) -> None:
    folder = model(tmp_path / "m", [{"a": EMBEDDING}])
    with full_disk(room), pytest.raises(DiskFull, match="free space"):
        pack_directory(folder, tmp_path / "new" / "folders" / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_one_file_goes_before_an_index_as_it_does_for_transformers(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", [{"a": EMBEDDING}, {"b": EMBEDDING}])
    save_file({"whole": EMBEDDING}, folder / OBJECT_NAME)
    assert [entry.name for entry in pack_directory(folder, tmp_path / "x").tensors] == ["whole"]


@pytest.mark.parametrize("metadata", [{"\ud800": "a"}, {"b": "\udfff"}, {"x" * 600: "a"}])
def test_metadata_that_names_no_tensor_makes_no_alias(tmp_path: Path, metadata: dict[str, str]) -> None:
    folder = model(tmp_path / "m", [{"a": EMBEDDING}])
    data = (folder / OBJECT_NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.dumps(json.loads(data[8 : 8 + length]) | {"__metadata__": metadata}).encode()
    (folder / OBJECT_NAME).write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    if any(len(name) > 512 for name in metadata):
        assert pack_directory(folder, tmp_path / "x").aliases == {}
    else:
        with pytest.raises(UserError, match=r"model\.safetensors: __metadata__ .* must be Unicode"):
            pack_directory(folder, tmp_path / "x")


def test_a_tensor_that_two_files_hold_is_the_users_to_sort_out(tmp_path: Path) -> None:
    folder = model(tmp_path / "m", [{"a": EMBEDDING}, {"b": EMBEDDING}])
    (folder / "model-1.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes())
    with pytest.raises(UserError, match="a tensor must be in one file, 'a' is in"):
        pack_directory(folder, tmp_path / "x")


def test_i6_a_damaged_snapshot_does_not_become_a_right_one_by_packing_it_again(tmp_path: Path) -> None:
    pack_directory(model(tmp_path / "m", [{"a": EMBEDDING}]), tmp_path / "x")
    data = bytearray((tmp_path / "x" / OBJECT_NAME).read_bytes())
    data[-1] ^= 1
    (tmp_path / "x" / OBJECT_NAME).write_bytes(data)
    with pytest.raises(IntegrityError, match=r"tensor 'a' is not what manifest\.json there says"):
        pack_directory(tmp_path / "x", tmp_path / "y")
    assert not list(tmp_path.glob("y*"))
    (tmp_path / "x" / "manifest.json").write_text('{"somebody": "else\'s"}')
    pack_directory(tmp_path / "x", tmp_path / "y")

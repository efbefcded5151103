from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hostile import HOSTILE
from safetensors.numpy import load_file, save_file

from echo2.broadcast.pack import pack_directory, verify_directory
from echo2.errors import IntegrityError, UserError
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
    folder = model(tmp_path / "m", [{"a": EMBEDDING}])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(IntegrityError):
        pack_directory(folder, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_e03_a_link_out_of_the_directory_is_refused_and_a_hub_cache_is_not(tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--x"
    folder = model(cache / "snapshots" / "revision", [{"a": EMBEDDING}])
    (cache / "blobs").mkdir()
    (folder / OBJECT_NAME).rename(cache / "blobs" / "hash")
    (folder / OBJECT_NAME).symlink_to(cache / "blobs" / "hash")
    pack_directory(folder, tmp_path / "x")
    (cache / "blobs" / "hash").rename(tmp_path / "elsewhere")
    (folder / OBJECT_NAME).unlink()
    (folder / OBJECT_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError, match="lead out"):
        pack_directory(folder, tmp_path / "y")


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
        with pytest.raises(IntegrityError, match=r"m/model\.safetensors: "):
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

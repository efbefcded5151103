from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo2.errors import UserError
from echo2.transport.model_folder import check_links, own_file, weight_files

INDEX = "model.safetensors.index.json"


def index(folder: Path, *names: object) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {f"w{i}": name for i, name in enumerate(names)}}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


def test_weights_are_one_file_or_those_that_an_index_names(folder: Path) -> None:
    for name in ("b.safetensors", "a.safetensors"):
        (folder / name).touch()
    index(folder, "b.safetensors", "a.safetensors", "b.safetensors")
    assert weight_files(folder) == [folder / "a.safetensors", folder / "b.safetensors"]
    (folder / "model.safetensors").touch()
    assert weight_files(folder) == [folder / "model.safetensors"]


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/x.safetensors", "sub/../../x.safetensors", "x.bin", ".safetensors", "a\0b", 3, None]
)
def test_e03_an_index_names_safetensors_files_beside_it_and_nothing_else(folder: Path, name: object) -> None:
    (folder.parent / "x.safetensors").touch()
    index(folder, name)
    with pytest.raises(UserError, match="must name safetensors files beside it") as caught:
        weight_files(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}', "[" * 100_000])
def test_an_index_that_names_nothing_is_refused(folder: Path, text: str) -> None:
    (folder / INDEX).write_text(text)
    with pytest.raises(UserError, match="weight_map that names files"):
        weight_files(folder)


def test_weights_that_are_missing_are_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"must hold model\.safetensors or"):
        weight_files(folder)
    index(folder, "a.safetensors")
    with pytest.raises(UserError, match=r"a\.safetensors is named by the index and missing"):
        weight_files(folder)


def test_e03_a_configuration_sends_nobody_to_other_weights(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_text('{"transformers_weights": "sub/other.safetensors.index.json"}')
    with pytest.raises(UserError, match="must leave transformers_weights out"):
        weight_files(folder)
    for text in ("{}", "[", "[]", '{"transformers_weights": null}'):
        (folder / "config.json").write_text(text)
        assert weight_files(folder) == [folder / "model.safetensors"]


def test_a_link_within_the_directory_is_followed_and_a_broken_one_is_no_file(folder: Path) -> None:
    (folder / "original").mkdir()
    (folder / "original" / "x.safetensors").touch()
    (folder / "model.safetensors").symlink_to("original/x.safetensors")
    (folder / "config.json").symlink_to("absent")
    (folder / "loop.json").symlink_to("loop.json")
    check_links(folder)
    assert weight_files(folder) == [folder / "original" / "x.safetensors"]
    assert own_file(folder, "config.json") is None
    assert own_file(folder, "loop.json") is None


@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "config.json", "tokenizer.model", "chat_template.jinja"])
def test_e03_a_link_out_of_the_directory_is_refused(folder: Path, name: str) -> None:
    (folder.parent / "secret").write_text("{}")
    (folder / name).symlink_to("../secret")
    with pytest.raises(UserError, match=f"{name} must not lead out of its directory, .*put a copy of the file there"):
        check_links(folder)
    with pytest.raises(UserError, match="lead out"):
        own_file(folder, name)


def test_a_link_that_no_loader_opens_is_left_alone(folder: Path) -> None:
    (folder.parent / "notes").touch()
    (folder / "README.md").symlink_to("../notes")
    (folder / "latest").symlink_to("..")
    check_links(folder)


@pytest.mark.parametrize("below", ["", "part"])
def test_links_of_a_hub_cache_lead_to_its_blobs_and_nowhere_else(tmp_path: Path, below: str) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    folder = repository / "snapshots" / "revision" / below
    folder.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "hash").touch()
    (repository / "refs").touch()
    (folder / "model.safetensors").symlink_to(Path("../" * (3 if below else 2)) / "blobs" / "hash")
    check_links(folder)
    assert weight_files(folder) == [repository / "blobs" / "hash"]
    (tmp_path / "shortcut").symlink_to(folder)
    assert weight_files(tmp_path / "shortcut") == [repository / "blobs" / "hash"]
    (folder / "config.json").symlink_to(repository / "refs")
    with pytest.raises(UserError, match="lead out"):
        check_links(folder)

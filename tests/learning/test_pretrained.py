from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from echo2.config.sections import ModelSection
from echo2.errors import UserError
from echo2.learning import gguf_model, pretrained
from echo2.learning.pretrained import asset_paths, check_model_directory, default_cache_dir, resolve_model


def model_directory(folder: Path, *without: str) -> Path:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        if name not in without:
            (folder / name).write_text("{}")
    return folder


def resolve(path: str, run_dir: Path, **more: Any) -> Path:
    return resolve_model(ModelSection(path=path), run_dir, **more)


def test_a_directory_is_used_where_it_lies(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    assert resolve(str(folder), tmp_path / "run") == folder
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("missing", "sentence"),
    [
        ("config.json", "must hold config.json"),
        ("tokenizer.json", "must hold a tokenizer"),
        ("model.safetensors", "must hold its weights as safetensors"),
    ],
)
def test_a_directory_that_lacks_a_part_is_refused_in_one_sentence(tmp_path: Path, missing: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        resolve(str(model_directory(tmp_path / "m", missing)), tmp_path)
    assert "\n" not in str(caught.value)


def test_a_broken_configuration_is_refused(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="must be JSON"):
        check_model_directory(folder)


def test_a_file_is_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").touch()
    with pytest.raises(UserError, match="must be a directory"):
        resolve(str(tmp_path / "m.safetensors"), tmp_path)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("", "it is empty"),
        ("/no/such/place", "does not exist"),
        ("./nowhere", "does not exist"),
        ("tiny:gpt9", "knows tiny:qwen3"),
        ("package:no-such-package-here", "not installed"),
        ("package:msgspec", "exactly one GGUF file, it holds 0"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(path: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=sentence):
        resolve(path, tmp_path)


def test_a_hub_id_is_downloaded_without_code_or_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model_directory(tmp_path / "snapshot")
    asked: dict[str, Any] = {}

    def download(repository: str, **more: Any) -> str:
        asked.update(more, repository=repository)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("Owner/name-4B", tmp_path) == folder
    assert asked["repository"] == "Owner/name-4B"
    assert not any(pattern.endswith((".py", ".bin", ".pt")) or pattern == "*" for pattern in asked["allow_patterns"])


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: Any, **__: Any) -> str:
        raise LocalEntryNotFoundError("cannot find it\nlong story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(UserError, match=r"could not be had from the hub \(cannot find it\)") as caught:
        resolve("Owner/name", tmp_path)
    assert "\n" not in str(caught.value)


def test_the_tiny_model_is_made_once_in_the_run_folder(tmp_path: Path) -> None:
    folder = resolve("tiny:qwen3", tmp_path, seed=1)
    first = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder == tmp_path / "model"
    assert resolve("tiny:qwen3", tmp_path, seed=1) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == first


def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, convert: Any) -> Path:
    source = tmp_path / "weights.gguf"
    source.write_bytes(b"gguf")
    monkeypatch.setattr(pretrained, "_packaged_gguf", lambda _: source)
    monkeypatch.setattr(pretrained.importlib.metadata, "version", lambda _: "1.2")
    monkeypatch.setattr(gguf_model, "convert_gguf", convert)
    return tmp_path / "cache"


def test_a_package_is_converted_once_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    converted = []

    def convert(source: Path, folder: Path) -> None:
        converted.append(source.read_bytes())
        model_directory(folder)

    cache = packaged(monkeypatch, tmp_path, convert)
    first = resolve("package:weights", tmp_path, cache_dir=cache)
    assert resolve("package:weights", tmp_path, cache_dir=cache) == first
    (tmp_path / "weights.gguf").write_bytes(b"other")
    assert resolve("package:weights", tmp_path, cache_dir=cache) != first
    assert converted == [b"gguf", b"other"]


def test_an_interrupted_conversion_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    cache = packaged(monkeypatch, tmp_path, interrupted)
    with pytest.raises(KeyboardInterrupt):
        resolve("package:weights", tmp_path, cache_dir=cache)
    assert list(cache.iterdir()) == []


def test_of_two_processes_that_convert_at_once_the_first_result_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def overtaken(_: Path, folder: Path) -> None:
        model_directory(folder)
        winner = folder.parent / folder.name.removeprefix(".").rpartition(".")[0]
        (model_directory(winner) / "config.json").write_text('{"winner": 1}')

    cache = packaged(monkeypatch, tmp_path, overtaken)
    folder = resolve("package:weights", tmp_path, cache_dir=cache)
    assert (folder / "config.json").read_text() == '{"winner": 1}'
    assert list(cache.iterdir()) == [folder]


def test_the_cache_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "echo2" / "models"


def test_assets_are_configuration_and_tokenizer_only(tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "m")
    for name in ("modeling_evil.py", "pytorch_model.bin", "chat_template.jinja"):
        (folder / name).touch()
    assert [path.name for path in asset_paths(folder)] == ["config.json", "tokenizer.json", "chat_template.jinja"]


def test_checking_a_directory_needs_no_torch() -> None:
    code = "import sys, echo2.learning.pretrained; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0

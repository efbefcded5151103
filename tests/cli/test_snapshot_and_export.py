from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from echo2.broadcast.snapshot import RawTensor
from echo2.learner.adapters import AdapterSnapshots

from .conftest import Echo2


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"tie_word_embeddings": True, "torch_dtype": "float16"}))
    (folder / "tokenizer.json").write_text("{}")
    save_file(
        {"model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(3, 4)}, folder / "model.safetensors"
    )
    return folder


@pytest.fixture
def run_folder(tmp_path: Path, model: Path, echo2: Echo2) -> Path:
    """A run folder with versions 0.0 and 0.2 on its shelf."""
    folder = tmp_path / "runs" / "r"
    for version in ("0.0", "0.2"):
        assert echo2("snapshot", "pack", model, "-o", folder / "snapshots" / version).code == 0
    (folder / "config.toml").write_text('[run]\nname = "r"\n[rollout]\nengine = "scripted"\n')
    (folder / "assets").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (folder / "assets" / name).write_bytes((model / name).read_bytes())
    return folder


def test_what_was_packed_verifies(echo2: Echo2, model: Path, tmp_path: Path) -> None:
    packed = echo2("snapshot", "pack", model, "-o", tmp_path / "out", "--json")
    verified = echo2("snapshot", "verify", tmp_path / "out", "--json")

    assert (packed.code, verified.code) == (0, 0)
    assert packed.json == verified.json
    assert (packed.json["tensors"], packed.json["tied"], packed.json["dtype"]) == (1, 1, "float32")
    shown = echo2("snapshot", "verify", tmp_path / "out").out
    assert "decoded_root" in shown
    assert shown.endswith("verified: every byte is what the manifest says\n")


def test_a_flipped_bit_fails_the_verification(echo2: Echo2, model: Path, tmp_path: Path) -> None:
    echo2("snapshot", "pack", model, "-o", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)

    done = echo2("snapshot", "verify", tmp_path / "out", "--json")

    assert done.code == 1
    assert done.json["ok"] is False
    assert len(done.faults) == 1


@pytest.mark.parametrize("command", ["pack", "verify"])
def test_a_missing_directory_is_the_users_mistake(echo2: Echo2, command: str, tmp_path: Path) -> None:
    out = ["-o", tmp_path / "out"] if command == "pack" else []

    done = echo2("snapshot", command, tmp_path / "absent", *out)

    assert done.code == 2
    assert len(done.faults) == 1


def test_an_export_is_a_model_directory_of_the_version_asked_for(
    echo2: Echo2, run_folder: Path, tmp_path: Path
) -> None:
    done = echo2("export", run_folder, "--version", "0", "-o", tmp_path / "hf", "--json")

    assert done.code == 0, done.err
    assert done.json["policy"] == "0.0"
    assert load_file(tmp_path / "hf" / "model.safetensors")["model.embed_tokens.weight"][2, 3] == 11.0
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config == {"dtype": "float32", "tie_word_embeddings": True}
    assert (tmp_path / "hf" / "tokenizer.json").is_file()


def test_the_newest_version_is_exported_unless_told_otherwise(echo2: Echo2, run_folder: Path, tmp_path: Path) -> None:
    assert echo2("export", run_folder, "-o", tmp_path / "a", "--json").json["policy"] == "0.2"
    assert "version 0.2" in echo2("export", run_folder, "-o", tmp_path / "b", "--version", "0.2").out


def test_a_version_that_was_only_checkpointed_is_exported_from_there(
    echo2: Echo2, run_folder: Path, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("echo2.learning.checkpoint")
    state = checkpoint.LearnerState(3, "", "", "", "r")
    checkpoint.save(run_folder / "checkpoints", state, {"w": torch.full((2,), 5.0)}, {})

    done = echo2("export", run_folder, "-o", tmp_path / "hf", "--json")

    assert (done.json["policy"], done.json["dtype"]) == ("0.3", "float32")
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == [5.0, 5.0]


def test_version_0_is_exported_where_a_warm_start_made_it(echo2: Echo2, run_folder: Path, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file as save_torch

    shutil.rmtree(run_folder / "snapshots" / "0.0")
    (run_folder / "checkpoints").mkdir()
    save_torch({"w": torch.full((2,), 3.0)}, run_folder / "checkpoints" / "initial.safetensors")
    done = echo2("export", run_folder, "--version", "0", "-o", tmp_path / "hf", "--json")
    assert (done.json["policy"], done.json["dtype"]) == ("0.0", "float32")
    assert load_file(tmp_path / "hf" / "model.safetensors")["w"].tolist() == [3.0, 3.0]
    assert echo2("export", run_folder, "-o", tmp_path / "newest", "--json").json["policy"] == "0.2"


def test_versions_that_are_not_kept_and_outputs_that_exist_are_refused(
    echo2: Echo2, run_folder: Path, tmp_path: Path
) -> None:
    absent = echo2("export", run_folder, "--version", "7", "-o", tmp_path / "hf")
    assert absent.code == 2
    assert absent.faults == ["version 7 is not kept; kept are 0.0, 0.2"]
    assert echo2("export", run_folder, "--version", "new", "-o", tmp_path / "hf").code == 2
    assert "must not exist yet" in echo2("export", run_folder, "-o", run_folder).faults[0]
    assert echo2("export", tmp_path, "-o", tmp_path / "hf").code == 2


def test_an_output_that_cannot_be_made_is_refused_and_leaves_nothing(
    echo2: Echo2, run_folder: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    (place / "file").touch()
    (place / "dangling").symlink_to(place / "nowhere")
    (place / "made.partial").touch()
    before = sorted(place.iterdir())
    for out in ("file/x", "dangling", "made"):
        done = echo2("export", run_folder, "-o", place / out)
        assert (done.code, len(done.faults)) == (2, 1)
    damaged = run_folder / "snapshots" / "0.2" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"!")
    assert echo2("export", run_folder, "-o", place / "new" / "folder").code == 1
    assert sorted(place.iterdir()) == before


def test_a_folder_of_snapshots_is_no_snapshot_and_no_folder_no_run(echo2: Echo2, run_folder: Path) -> None:
    verified = echo2("snapshot", "verify", run_folder / "snapshots")
    assert (verified.code, verified.faults[0].rpartition(": ")[2]) == (2, "give one of those in it, such as 0.2")
    exported = echo2("export", run_folder.parent / "absent", "-o", run_folder.parent / "hf")
    assert exported.code == 2
    assert "must be a run's folder or its configuration file, but there is neither" in exported.faults[0]


def test_adapters_in_a_checkpoint_are_exported_merged_or_alone(echo2: Echo2, run_folder: Path, tmp_path: Path) -> None:
    """W = 1 everywhere, A = [[1, 2]], B = [[1], [3]], alpha / rank = 4: W + 4 B A = [[5, 9], [13, 25]]."""
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("echo2.learning.checkpoint")
    ones = np.ones((2, 2), np.float32)
    keeper = AdapterSnapshots(run_folder / "learner" / "base", "r", "float32", 4.0)
    keeper.keep_base({"q.weight": ("F32", (2, 2), lambda: RawTensor.of(ones).data)}, {}, known=False)
    (run_folder / "config.toml").write_text('model.path = "some/model"\nlora = { rank = 1, alpha = 4.0 }\n')
    part = "base_model.model.q.lora_{}.weight"
    weights = {part.format("A"): torch.tensor([[1.0, 2.0]]), part.format("B"): torch.tensor([[1.0], [3.0]])}
    checkpoint.save(run_folder / "checkpoints", checkpoint.LearnerState(3, "", "", "", "r"), weights, {})

    done = echo2("export", run_folder, "-o", tmp_path / "merged", "--json")
    assert (done.code, done.json["policy"], done.json["adapter"]) == (0, "0.3", False), done.err
    assert load_file(tmp_path / "merged" / "model.safetensors")["q.weight"].tolist() == [[5, 9], [13, 25]]
    assert not [path for path in (tmp_path / "merged").iterdir() if "adapters" in path.name or "made" in path.name]

    assert echo2("export", run_folder, "--adapter", "-o", tmp_path / "alone").code == 0
    assert load_file(tmp_path / "alone" / "adapter_model.safetensors")[part.format("B")].tolist() == [[1], [3]]
    told = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["target_modules"]) == (1, 4.0, ["q"])
    assert told["base_model_name_or_path"].endswith("some/model")

    none = echo2("export", run_folder, "--adapter", "--version", "0.2", "-o", tmp_path / "none")
    assert (none.code, len(none.faults)) == (2, 1)
    assert "--adapter is for versions that are adapters of version 0" in none.faults[0]

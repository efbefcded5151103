from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from .conftest import Echo2, Outcome

Making = Callable[[str, object], Outcome]


def model(folder: Path, weights: np.ndarray, *, config: str = "{}") -> Path:  # type: ignore[type-arg]
    folder.mkdir()
    (folder / "config.json").write_text(config)
    save_file({"w": weights}, folder / "model.safetensors")
    return folder


@pytest.fixture
def weights() -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(0).standard_normal(20_000).astype(np.float16)


@pytest.fixture
def pair(tmp_path: Path, weights: np.ndarray) -> tuple[Path, Path]:  # type: ignore[type-arg]
    bits = weights.view(np.uint16).copy()
    bits[::100] += 1
    return model(tmp_path / "a", weights), model(tmp_path / "b", bits.view(np.float16), config='{"new": 1}')


def test_a_patch_is_small_and_makes_the_newer_model(echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path) -> None:
    diff = echo2("snapshot", "diff", *pair, "-o", tmp_path / "p", "--json")
    applied = echo2("snapshot", "apply", pair[0], tmp_path / "p", "-o", tmp_path / "out", "--json")
    verified = echo2("snapshot", "verify", tmp_path / "out", "--json")

    assert (diff.code, applied.code, verified.code) == (0, 0, 0)
    assert (diff.json["kind"], diff.json["why"], diff.json["files"]) == ("delta", "", ["config.json"])
    assert diff.json["bytes"] == (tmp_path / "p").stat().st_size < 0.1 * diff.json["raw_bytes"]
    assert applied.json == verified.json
    assert applied.json["decoded_root"] == diff.json["decoded_root"]
    assert (
        load_file(tmp_path / "out" / "model.safetensors")["w"] == load_file(pair[1] / "model.safetensors")["w"]
    ).all()
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"new": 1}


def test_people_are_told_what_the_patch_is(echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path) -> None:
    done = echo2("snapshot", "diff", *pair, "-o", tmp_path / "p")
    assert "a delta, for this base only" in done.out
    assert "with config.json" in done.out
    assert "decoded_root" in echo2("snapshot", "apply", pair[0], tmp_path / "p", "-o", tmp_path / "out").out


def test_a_patch_that_is_no_delta_says_so(echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path) -> None:
    other = model(tmp_path / "c", np.ones(7, np.float32))
    done = echo2("snapshot", "diff", other, pair[0], "-o", tmp_path / "p")
    assert "an anchor, which applies to any base, because the tensors have other names, types or shapes" in done.out
    assert echo2("snapshot", "apply", other, tmp_path / "p", "-o", tmp_path / "out").code == 0


def test_the_wrong_base_is_one_sentence_and_exit_code_2(echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path) -> None:
    echo2("snapshot", "diff", *pair, "-o", tmp_path / "p")

    done = echo2("snapshot", "apply", pair[1], tmp_path / "p", "-o", tmp_path / "out")

    assert done.code == 2
    assert len(done.faults) == 1
    assert "is not what" in done.faults[0]
    assert not (tmp_path / "out").exists()


def test_a_damaged_patch_is_one_sentence_and_exit_code_1(echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path) -> None:
    echo2("snapshot", "diff", *pair, "-o", tmp_path / "p")
    (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:-1])

    done = echo2("snapshot", "apply", pair[0], tmp_path / "p", "-o", tmp_path / "out")

    assert done.code == 1
    assert len(done.faults) == 1


COMMANDS = ("pack", "diff", "apply")


@pytest.fixture
def making(echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path) -> Making:
    """Run a command that makes ``out`` of the pair."""
    echo2("snapshot", "diff", *pair, "-o", tmp_path / "patch")
    inputs = {"pack": pair[:1], "diff": pair, "apply": (pair[0], tmp_path / "patch")}

    def make(command: str, out: object) -> Outcome:
        return echo2("snapshot", command, *inputs[command], "-o", out)

    return make


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "out", ["a", "file", "file/x", "file/new/x", "dangling", "dangling/x", "", "new/..", "taken", "x" * 300, "x" * 250]
)
def test_an_output_that_cannot_be_made_is_one_sentence_and_exit_code_2(
    making: Making, tmp_path: Path, command: str, out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to("nothing")
    (tmp_path / "taken.object.aside").mkdir()
    for name in ("taken.partial", "taken.unpacked.aside"):
        (tmp_path / name).touch()
    before = everything(tmp_path)
    monkeypatch.chdir(tmp_path)

    done = making(command, out)

    assert (done.code, len(done.faults), done.out) == (2, 1, "")
    assert everything(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_may_not_be_read_is_one_sentence_and_leaves_nothing(
    making: Making, tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.read_bytes

    def read_bytes(path: Path) -> bytes:
        if path.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    (tmp_path / "a" / "tokenizer.json").touch()
    before = everything(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", read_bytes)

    done = making(command, tmp_path / "new" / "out")

    assert (done.code, len(done.faults)) == (2, 1)
    assert "tokenizer.json must be a path that can be used here, got: Permission denied" in done.faults[0]
    assert everything(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("fault", ["surrogate", "cut", "names a path", "leads out"])
def test_a_broken_model_directory_is_one_sentence_and_exit_code_2(
    making: Making, tmp_path: Path, command: str, fault: str
) -> None:
    file = tmp_path / "a" / "model.safetensors"
    data = file.read_bytes()
    if fault == "surrogate":
        length = int.from_bytes(data[:8], "little")
        header = json.dumps(json.loads(data[8 : 8 + length]) | {"__metadata__": {"\ud800": "w"}}).encode()
        file.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    elif fault == "cut":
        file.write_bytes(data[:-1])
    elif fault == "names a path":
        file.rename(tmp_path / "x.safetensors")
        (tmp_path / "a" / "model.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}')
    else:
        file.rename(tmp_path / "x.safetensors")
        file.symlink_to("../x.safetensors")
    before = everything(tmp_path)

    done = making(command, tmp_path / "new" / "out")

    assert (done.code, len(done.faults)) == (2, 1)
    assert everything(tmp_path) == before


@pytest.mark.parametrize("side", [0, 1])
def test_a_flipped_bit_of_a_snapshot_ends_a_diff_as_it_ends_a_verification(
    echo2: Echo2, pair: tuple[Path, Path], tmp_path: Path, side: int
) -> None:
    folders = []
    for folder in pair:
        folders.append(tmp_path / f"{folder.name}.packed")
        echo2("snapshot", "pack", folder, "-o", folders[-1])
    data = bytearray((folders[side] / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folders[side] / "model.safetensors").write_bytes(data)
    before = everything(tmp_path)

    done = echo2("snapshot", "diff", *folders, "-o", tmp_path / "p")

    assert done.code == echo2("snapshot", "verify", folders[side]).code == 1
    assert len(done.faults) == 1
    assert f"{folders[side].name}: tensor 'w' must have the bytes that were hashed before" in done.faults[0]
    assert everything(tmp_path) == before


def test_an_output_may_lie_in_its_input_and_changes_nothing_there(making: Making, tmp_path: Path) -> None:
    wanted = (tmp_path / "a" / "model.safetensors").read_bytes()
    for command in COMMANDS:
        assert making(command, tmp_path / "a" / command).code == 0
    assert making("pack", tmp_path / "again").code == 0
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == [
        "config.json", "manifest.json", "model.safetensors",
    ]  # fmt: skip
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == wanted


def test_a_name_that_is_no_text_is_printed_nevertheless(
    making: Making, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = os.fsdecode(bytes(tmp_path) + b"/\xff")
    done = making("pack", out)
    assert done.code == 0
    assert r"/\xff" in done.out

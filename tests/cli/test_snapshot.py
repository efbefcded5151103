from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from .conftest import Echo2


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

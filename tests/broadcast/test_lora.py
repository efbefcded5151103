"""Adapters of a base: figures worked by hand, the same bytes whatever is merged at a time, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from echo2.broadcast import lora
from echo2.broadcast.body import open_snapshot
from echo2.broadcast.lora import Pair, adapted_rows, decode_lora, read_adapters, rounded, widened, write_adapters
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.errors import IntegrityError
from echo2.types import Policy

NAME = "base_model.model.layers.0.q_proj.lora_{}.weight"


def floats(values: object) -> NDArray[np.float32]:
    return np.asarray(values, np.float32)


def stream(array: NDArray[np.float32]) -> tuple[str, tuple[int, ...], object]:
    return "F32", array.shape, lambda: RawTensor.of(array).data


def written(path: Path, down: NDArray[np.float32], up: NDArray[np.float32], alpha: float = 4.0) -> dict[str, Pair]:
    write_adapters({NAME.format("A"): stream(down), NAME.format("B"): stream(up)}, alpha, Policy(0, 2), path)
    return read_adapters(path, path.stat().st_size)


def test_a_matrix_with_its_adapter_is_what_one_finds_by_hand(tmp_path: Path) -> None:
    """W = [[1, 2, 3], [4, 5, 6]], A = [[1, 0, 2], [0, 1, 1]], B = [[1, 2], [3, 4]], alpha / rank = 4 / 2 = 2.

    B A = [[1, 2, 4], [3, 4, 10]]; W + 2 B A = [[3, 6, 11], [10, 13, 26]].
    """
    pairs = written(tmp_path / "a", floats([[1, 0, 2], [0, 1, 1]]), floats([[1, 2], [3, 4]]))
    ((name, pair),) = pairs.items()
    assert name == "layers.0.q_proj.weight"
    weight = floats([[1, 2, 3], [4, 5, 6]])
    assert adapted_rows(weight, pair, 0).tolist() == [[3, 6, 11], [10, 13, 26]]
    assert adapted_rows(weight[1:], pair, 1).tolist() == [[10, 13, 26]]


def test_rounding_to_bfloat16_is_to_the_nearest_and_ties_go_to_even() -> None:
    """bfloat16 has 7 bits after the leading one: near 1 its steps are 2^-7, so 1 + 2^-8 is a tie."""
    step = 2.0**-7
    values = floats([1, 1 + step / 2, 1 + 3 * step / 2, 1 + step * 0.51, -1 - step / 2, 0, np.nan, np.inf, 3e38])
    near = widened(rounded(values, "BF16"), "BF16")
    assert near[:6].tolist() == [1, 1, 1 + 2 * step, 1 + step, -1, 0]
    assert np.isnan(near[6])
    assert near[7] == np.inf
    assert np.isfinite(near[8])


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@given(seed=st.integers(0, 2**32 - 1), rank=st.integers(1, 3), block=st.sampled_from([8, 24, 1 << 20]))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_bytes_come_out_whatever_is_merged_at_a_time(
    dtype: str, seed: int, rank: int, block: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    random = np.random.default_rng(seed)
    weight, other = floats(random.standard_normal((7, 5))), floats(random.standard_normal(11))
    declared = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}[dtype]
    tensors = {
        name: RawTensor(dtype, array.shape, rounded(array.reshape(-1), dtype).data)
        for name, array in (("layers.0.q_proj.weight", weight), ("norm", other))
    }
    write_snapshot(tensors, {}, run_id="r", policy=Policy(0, 0), dtype=declared, folder=folder / "base")
    pairs = written(folder / "a", floats(random.standard_normal((rank, 5))), floats(random.standard_normal((7, rank))))
    base = open_snapshot(folder / "base")
    with pytest.MonkeyPatch.context() as patch, base.body:
        whole = b"".join(bytes(part) for part in decode_lora(pairs, base.contents, base.body))
        patch.setattr(lora, "_BLOCK_BYTES", block)
        patch.setattr(lora, "_CACHED_ELEMENTS", 6)
        assert b"".join(bytes(part) for part in decode_lora(pairs, base.contents, base.body)) == whole
    merged = np.frombuffer(whole, np.uint8)
    at, size = (0, tensors["layers.0.q_proj.weight"].data.nbytes)
    pair = pairs["layers.0.q_proj.weight"]
    exact = widened(np.frombuffer(tensors["layers.0.q_proj.weight"].data, np.uint8), dtype).astype(np.float64)
    exact = exact.reshape(7, 5) + pair.up.astype(np.float64) @ pair.down.astype(np.float64)
    error = {"BF16": 2.0**-8, "F16": 2.0**-11, "F32": 2.0**-20}[dtype]
    assert np.allclose(widened(merged[at : at + size].copy(), dtype).reshape(7, 5), exact, rtol=error, atol=error)
    assert whole[size:] == bytes(tensors["norm"].data)


def test_adapters_of_another_model_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    tensors = {"layers.0.q_proj.weight": RawTensor.of(floats(np.ones((2, 4))))}
    write_snapshot(tensors, {}, run_id="r", policy=Policy(0, 0), dtype="float32", folder=tmp_path / "base")
    base = open_snapshot(tmp_path / "base")
    pairs = written(tmp_path / "a", floats(np.ones((1, 3))), floats(np.ones((2, 1))))
    with base.body, pytest.raises(IntegrityError, match=r"adapters of shape \[2, 3\]"):
        next(decode_lora(pairs, base.contents, base.body))


def test_a_file_that_is_no_adapters_is_refused(tmp_path: Path) -> None:
    path, one = tmp_path / "a", floats(np.ones((2, 2)))
    cases = [
        ({NAME.format("A"): stream(one)}, 1.0, "must have A of shape"),
        ({NAME.format("A"): stream(one), NAME.format("B"): stream(floats(np.ones((2, 3))))}, 1.0, "must have A of"),
        ({"model.norm.weight": stream(one)}, 1.0, "must be floating matrices A and B"),
        ({NAME.format("A"): stream(one), NAME.format("B"): stream(one)}, -1.0, "must say a positive lora_alpha"),
    ]
    for tensors, alpha, told in cases:
        write_adapters(tensors, alpha, Policy(0, 2), path)
        with pytest.raises(IntegrityError, match=told):
            read_adapters(path, path.stat().st_size)
    with pytest.raises(IntegrityError):
        read_adapters(path, path.stat().st_size - 1)


def test_what_is_written_is_a_safetensors_file_with_pefts_names(tmp_path: Path) -> None:
    written(tmp_path / "a", floats([[1, 2]]), floats([[3], [4]]), alpha=2.5)
    data = (tmp_path / "a").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header.pop("__metadata__") == {"format": "pt", "lora_alpha": "2.5", "policy": "0.2"}
    assert set(header) == {NAME.format("A"), NAME.format("B")}

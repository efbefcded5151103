from __future__ import annotations

import pytest
import torch
from trajectories import tiny_qwen3

from echo2.learning.weights import Tensors, as_snapshot, stored_tensors, weights_hash


def test_e01_tied_weights_are_stored_once_and_named_twice() -> None:
    stored, aliases = stored_tensors(tiny_qwen3(tied=True))
    assert aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert "lm_head.weight" not in stored


def test_e01_untied_weights_are_both_stored() -> None:
    stored, aliases = stored_tensors(tiny_qwen3(tied=False))
    assert aliases == {}
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= stored.keys()


@pytest.mark.parametrize(
    ("dtype", "name", "size"), [("bfloat16", "BF16", 2), ("float16", "F16", 2), ("float32", "F32", 4)]
)
def test_e12_a_snapshot_has_the_declared_element_type(dtype: str, name: str, size: int) -> None:
    stored, _ = stored_tensors(tiny_qwen3())
    for key, tensor in as_snapshot(Tensors.of(stored), dtype).items():
        assert tensor.dtype == name
        assert tensor.read().nbytes == stored[key].numel() * size
        assert tensor.shape == tuple(stored[key].shape)


def test_tensors_that_are_not_floating_keep_their_type() -> None:
    found = as_snapshot(Tensors.of({"positions": torch.arange(3)}), "bfloat16")["positions"]
    assert found.dtype == "I64"
    assert bytes(found.read()) == bytes(torch.arange(3).numpy().data)


def test_the_hash_depends_on_every_name_type_shape_and_bit() -> None:
    base = {"a": torch.zeros(2, 3)}
    variants = [
        {"b": torch.zeros(2, 3)},
        {"a": torch.zeros(3, 2)},
        {"a": torch.zeros(2, 3, dtype=torch.int32)},
        {"a": torch.tensor([[0.0, 0, 0], [0, 0, -0.0]])},
    ]
    hashes = {weights_hash(Tensors.of(tensors)) for tensors in [base, *variants]}
    assert len(hashes) == 5
    one, other = {"b": torch.ones(1), "a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.ones(1)}
    assert weights_hash(Tensors.of(one)) == weights_hash(Tensors.of(other))

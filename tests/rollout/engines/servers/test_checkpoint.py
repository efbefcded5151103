from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_models import TinyModel
from transformers import AutoModelForCausalLM

from echo2.errors import EngineError
from echo2.rollout.engines.servers.checkpoint import lay_out, model_limits
from echo2.types import Policy

V0, V1 = Policy(0, 0), Policy(0, 1)


@pytest.mark.parametrize("kind", ["llama", "tied-llama", "gpt2"])
def test_a_loader_finds_every_tensor_in_what_was_laid_out(kind: str, tmp_path: Path) -> None:
    """E01: also where the snapshot stores a tied tensor under the output layer's name."""
    tiny = TinyModel(kind, tmp_path / "model")
    laid = lay_out(tiny.snapshot(tiny.model, V0), V0, tiny.folder, tmp_path / "into", "float32", None)
    loaded, told = AutoModelForCausalLM.from_pretrained(laid.folder, output_loading_info=True, dtype=torch.float32)
    assert not told["missing_keys"]
    for (name, ours), theirs in zip(tiny.model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_what_was_laid_out_outlives_the_snapshot_and_holds_no_sampling_defaults(tmp_path: Path) -> None:
    tiny = TinyModel("llama", tmp_path / "model")
    (tiny.folder / "generation_config.json").write_text('{"top_k": 5}')
    (tiny.folder / "tokenizer.json").write_text("{}")
    snapshot = tiny.snapshot(tiny.model, V0)
    laid = lay_out(snapshot, V0, tiny.folder, tmp_path / "into", "float32", None)
    content = (snapshot / "model.safetensors").read_bytes()
    (snapshot / "model.safetensors").unlink()
    assert sorted(path.name for path in laid.folder.iterdir()) == [
        "config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    assert laid.weights.read_bytes() == content


def test_weights_are_compared_to_the_byte(tmp_path: Path) -> None:
    tiny = TinyModel("llama", tmp_path / "model")
    one, same, other = [
        lay_out(tiny.snapshot(tiny.fresh(seed), policy), policy, tiny.folder, tmp_path / "into", "float32", None)
        for seed, policy in ((0, V0), (0, V1), (1, Policy(0, 2)))
    ]
    assert one.holds_what(same)
    assert not one.holds_what(other)


def test_a_snapshot_of_another_model_or_type_is_refused(tmp_path: Path) -> None:
    tiny, wide = TinyModel("llama", tmp_path / "model"), TinyModel("served", tmp_path / "wide")
    into = tmp_path / "into"
    first = lay_out(tiny.snapshot(tiny.model, V0), V0, tiny.folder, into, "float32", None)
    with pytest.raises(EngineError, match="must hold the model's tensors"):
        lay_out(wide.snapshot(wide.model, V1), V1, tiny.folder, into, "float32", first)
    halved = tiny.snapshot(tiny.model, V1, torch.bfloat16)
    with pytest.raises(EngineError, match="must hold float32, it holds bfloat16"):
        lay_out(halved, V1, tiny.folder, into, "float32", first)
    manifest = json.loads((halved / "manifest.json").read_text())
    (halved / "manifest.json").write_text(json.dumps({**manifest, "dtype": "float32", "aliases": {"a": "nothing"}}))
    with pytest.raises(EngineError, match=r"must hold the model's tensors: .* must be \('F32'"):
        lay_out(halved, V1, tiny.folder, into, "float32", first)
    with pytest.raises(EngineError, match=r"ties others to: \['nothing'\]"):
        lay_out(halved, V1, tiny.folder, into, "float32", None)
    assert [path.name for path in into.iterdir()] == ["0.0"]


def test_limits_come_from_the_models_configuration(tmp_path: Path) -> None:
    assert model_limits(TinyModel("gpt2", tmp_path / "a").folder) == (64, 64)
    with pytest.raises(EngineError, match=r"readable config\.json"):
        model_limits(tmp_path)

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trajectories import VOCABULARY, policy_of, saved, tiny_gpt2, tiny_qwen3
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM

from echo2.errors import ConfigError, UserError
from echo2.learning.batch import TrainingRow
from echo2.learning.loading import load_causal_lm
from echo2.learning.packing import pack
from echo2.learning.policy_model import PolicyModel, pick_device


def rows() -> list[TrainingRow]:
    """One group of replies of 9, 6 and 1 tokens to a prompt of 4, longest first."""
    random = np.random.default_rng(5)
    prompt = random.integers(0, VOCABULARY, 4)
    made = []
    for length, temperature in ((9, 0.5), (6, 1.0), (1, 1.3)):
        tokens = np.concatenate([prompt, random.integers(0, VOCABULARY, length)])
        made.append(TrainingRow(0, tokens, np.arange(len(tokens)) >= 4, None, 0.0, temperature, True, False))
    return made


@torch.no_grad()
def logps(policy: PolicyModel, given: list[TrainingRow], *, budget: int, share: bool) -> list[float]:
    micros = pack(given, budget=budget, share_prefixes=share)
    return [float(value) for micro in micros for value in policy.logprobs(micro)[0]]


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_gpt2])
def test_b11_padding_and_sharing_leave_every_log_prob_as_it_is_alone(make: Any) -> None:
    policy = policy_of(make())
    assert policy.shares_prefixes
    alone = logps(policy, rows(), budget=1, share=False)
    assert logps(policy, rows(), budget=1000, share=False) == pytest.approx(alone, abs=1e-4)
    assert logps(policy, rows(), budget=1000, share=True) == pytest.approx(alone, abs=1e-4)
    shortest = [row for row in rows() if row.targets == 1]
    assert logps(policy, shortest, budget=1, share=False) == pytest.approx(alone[-1:], abs=1e-4)


def test_log_probs_are_those_of_the_models_own_logits() -> None:
    model = tiny_qwen3()
    row = rows()[0]
    with torch.no_grad():
        logits = model(torch.from_numpy(row.tokens)[None]).logits[0] / 0.5
    expected = logits.log_softmax(-1)[np.flatnonzero(row.loss) - 1, row.tokens[row.loss]]
    assert logps(policy_of(model), [row], budget=99, share=True) == pytest.approx(expected.tolist(), abs=1e-4)


def test_the_first_pass_and_a_second_agree_exactly_because_dropout_is_off() -> None:
    policy = policy_of(tiny_gpt2().train())
    assert logps(policy, rows(), budget=99, share=True) == logps(policy, rows(), budget=99, share=True)


def test_an_architecture_that_reshapes_its_logits_is_refused() -> None:
    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.1, initializer_range=0.5, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with pytest.raises(UserError, match="Gemma2ForCausalLM the log-probs differ"):
        policy_of(Gemma2ForCausalLM(config))


def test_a_sliding_window_keeps_prefixes_apart() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=8,
    )  # fmt: skip
    assert not policy_of(MistralForCausalLM(config)).shares_prefixes


def test_a_processor_without_bfloat16_computes_in_float32_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": False})
    with caplog.at_level(logging.WARNING):
        policy = PolicyModel(tiny_qwen3(), compute_dtype="bfloat16", logits_chunk_tokens=64)
    assert "only emulates" in caplog.text
    expected = logps(policy_of(tiny_qwen3()), rows(), budget=99, share=True)
    assert logps(policy, rows(), budget=99, share=True) == expected


def test_autocast_keeps_weights_and_gradients_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    policy = PolicyModel(tiny_qwen3(), compute_dtype="bfloat16", logits_chunk_tokens=64)
    logp, _ = policy.logprobs(pack(rows(), budget=99, share_prefixes=True)[0])
    logp.sum().backward()
    assert logp.dtype is torch.float32
    assert {p.dtype for p in policy.parameters().values()} == {torch.float32}
    assert {p.grad.dtype for p in policy.parameters().values() if p.grad is not None} == {torch.float32}


def test_a_directory_that_holds_no_causal_lm_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = saved(tiny_qwen3(), tmp_path)
    (folder / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(UserError, match="must load as a causal language model") as caught:
        load_causal_lm(folder, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def sharded(folder: Path) -> list[Path]:
    """A small model in files of a few kilobytes."""
    tiny_qwen3().save_pretrained(folder, max_shard_size="8KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    return shards


@pytest.mark.parametrize("damage", ["cut", "overwritten", "empty"])
def test_damaged_weights_are_named_in_one_sentence(tmp_path: Path, damage: str) -> None:
    shard = sharded(tmp_path)[1]
    data = shard.read_bytes()
    shard.write_bytes({"cut": data[:-1], "overwritten": b"\xff" * len(data), "empty": b""}[damage])
    with pytest.raises(
        UserError, match=f"{shard.name} must be a whole safetensors file, .*download it again"
    ) as caught:
        load_causal_lm(tmp_path, torch.device("cpu"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../{}", "{}"])
def test_e03_weights_that_an_index_has_outside_the_directory_are_not_loaded(tmp_path: Path, name: str) -> None:
    shard = sharded(tmp_path / "m")[0]
    shard.rename(tmp_path / shard.name)
    index = tmp_path / "m" / "model.safetensors.index.json"
    elsewhere = name.format(shard.name if ".." in name else tmp_path / shard.name)
    index.write_text(index.read_text().replace(shard.name, elsewhere))
    with pytest.raises(UserError, match="must name safetensors files beside it"):
        load_causal_lm(tmp_path / "m", torch.device("cpu"))


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
def test_e03_links_out_of_the_directory_are_not_loaded_and_those_of_a_hub_cache_are(tmp_path: Path, name: str) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "revision", tmp_path / "models--x" / "blobs"
    blobs.mkdir(parents=True)
    tiny_qwen3().save_pretrained(snapshot)
    for path in list(snapshot.iterdir()):
        path.rename(blobs / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    load_causal_lm(snapshot, torch.device("cpu"))
    (blobs / name).rename(tmp_path / name)
    (snapshot / name).unlink()
    (snapshot / name).symlink_to(tmp_path / name)
    with pytest.raises(UserError, match=f"{name} must not lead out of its directory"):
        load_causal_lm(snapshot, torch.device("cpu"))


def test_a_configuration_of_nonsense_is_refused_in_one_sentence(tmp_path: Path) -> None:
    folder = saved(tiny_qwen3(), tmp_path)
    keys = json.loads((folder / "config.json").read_text())
    for nonsense in ({"hidden_size": "many"}, {"num_attention_heads": 0}, {"layer_types": 3}):
        (folder / "config.json").write_text(json.dumps(keys | nonsense))
        with pytest.raises(UserError, match="must load as a causal language model"):
            load_causal_lm(folder, torch.device("cpu"))


def test_weights_load_as_float32_whatever_they_were_saved_in(tmp_path: Path) -> None:
    folder = saved(tiny_qwen3().to(torch.bfloat16), tmp_path)
    assert {p.dtype for p in load_causal_lm(folder, torch.device("cpu")).parameters()} == {torch.float32}


def test_a_device_this_machine_lacks_is_refused() -> None:
    assert pick_device("cpu").type == "cpu"
    with pytest.raises(ConfigError, match="must be auto, cpu, cuda or cuda:N, got 'abacus'"):
        pick_device("abacus")
    with pytest.raises(ConfigError, match="CUDA devices"):
        pick_device("cuda:99")

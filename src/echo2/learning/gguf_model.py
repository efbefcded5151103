"""A GGUF file as a Hugging Face model directory.

The GGUF file's numbers are kept as they are: blocks are dequantised to float32 and never rounded again.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging


def convert_gguf(source: Path, folder: Path) -> None:
    """Write configuration, tokenizer and float32 weights of the GGUF file ``source`` into ``folder``."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name, local_files_only=True)
    loaded = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32, local_files_only=True
    )
    # What was loaded keeps a quantizer that refuses to be saved though its tensors are plain float32 by now; a fresh
    # model of the same architecture takes them over without it.
    fields = loaded.config.to_dict()
    for name in ("quantization_config", "_name_or_path", "_model_name_or_path"):
        fields.pop(name, None)
    config = AutoConfig.for_model(**fields)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    fresh.load_state_dict(loaded.state_dict())
    fresh.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

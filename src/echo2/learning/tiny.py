"""A Qwen3 of half a million parameters with a character tokenizer, for runs that must learn in minutes on a CPU.

Invariant: the directory is a function of the seed alone, and text of printable ASCII and newlines survives
encode-decode unchanged.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
ROLES = ("system", "user", "assistant")
"""Role names are one token each: spelt in letters they would double the prompt of a small sum."""

CHARACTERS = "\n" + "".join(map(chr, range(0x20, 0x7F)))

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML without a default system turn."""

CONTEXT_TOKENS = 2048


def write_tiny_model(folder: Path, seed: int) -> None:
    """Write the tokenizer and randomly initialised weights of ``seed`` into ``folder``."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    tokenizer = character_tokenizer()
    tokenizer.save_pretrained(folder)
    model = tiny_qwen3(len(tokenizer), seed)
    model.config.eos_token_id = tokenizer.convert_tokens_to_ids(TURN_END)
    model.config.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; the end of a turn and padding have different ids."""
    specials = [END_OF_TEXT, TURN_START, TURN_END]
    words = [*specials, *ROLES, *CHARACTERS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=END_OF_TEXT))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(ROLES) + r"|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(special, special=True, normalized=False) for special in specials])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        unk_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        eos_token=TURN_END,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_TOKENS,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped


def tiny_qwen3(vocabulary: int, seed: int) -> Qwen3ForCausalLM:
    """A fresh float32 model; the global random state is left as it was."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT_TOKENS,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.support.trajectories import tiny_gpt2, tiny_qwen3
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.learning.accounting import ModelFlops, model_flops, peak_flops
from echo2.learning.batch import TrainingRow
from echo2.learning.packing import pack


def row(group: int, prompt: int, reply: int) -> TrainingRow:
    tokens = np.arange(prompt + reply, dtype=np.int64) + (np.arange(prompt + reply) >= prompt) * reply
    return TrainingRow(group, tokens, np.arange(len(tokens)) >= prompt, None, 1.0, 1.0, current=True, nucleus=False)


def test_flops_of_a_decoder_are_those_worked_out_by_hand() -> None:
    config = Qwen3Config(
        vocab_size=100, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    found = model_flops(Qwen3ForCausalLM(config))
    of_a_layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 32  # q; k and v; o; gate, up and down
    assert found == ModelFlops(per_token=2 * 2 * of_a_layer, per_pair=4 * 16 * 2, per_target=2 * 100 * 16)


def test_tokens_pairs_and_targets_of_separate_rows_are_counted_without_padding() -> None:
    micros = pack([row(0, 3, 2), row(1, 2, 1)], budget=100, share_prefixes=False)
    assert ModelFlops(1.0, 0.0, 0.0).forward(micros) == 5 + 3
    assert ModelFlops(0.0, 1.0, 0.0).forward(micros) == 15 + 6
    assert ModelFlops(0.0, 0.0, 1.0).forward(micros) == 2 + 1


def test_a_shared_prompt_counts_once_and_branches_do_not_see_each_other() -> None:
    (micro,) = pack([row(0, 4, 2), row(0, 4, 2)], budget=100, share_prefixes=True)
    assert micro.visible is not None
    assert ModelFlops(1.0, 0.0, 0.0).forward([micro]) == 4 + 2 + 2
    assert ModelFlops(0.0, 1.0, 0.0).forward([micro]) == 10 + 2 * (5 + 6)


def test_an_untied_head_is_not_among_the_matrices_of_the_layers() -> None:
    tied, untied = model_flops(tiny_qwen3(tied=True)), model_flops(tiny_qwen3(tied=False))
    assert tied == untied


def test_an_architecture_without_head_dim_is_counted_too() -> None:
    found = model_flops(tiny_gpt2())
    assert found.per_pair == 4 * 16 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_processor_can_do_is_measured(dtype: torch.dtype) -> None:
    assert 1e7 < peak_flops(torch.device("cpu"), dtype) < 1e15

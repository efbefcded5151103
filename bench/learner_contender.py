"""One contender of ``bench.learner``, in a process of its own: ``TITLE ORDER`` in, one JSON line out."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Replies:
    """What every contender trains on."""

    prompts: list[list[int]]
    replies: list[list[int]]
    advantages: list[float]
    groups: list[int]

    @property
    def targets(self) -> int:
        return sum(map(len, self.replies))


def draw(order: dict[str, Any]) -> Replies:
    """Prompts and replies of chance tokens; the same for the same order."""
    random = np.random.default_rng(0)
    shortest, longest, n = max(1, order["longest"] // 8), order["longest"], order["n"]
    prompts, replies, groups = [], [], []
    for group in range(order["groups"]):
        prompt = random.integers(4, order["vocabulary"], order["prompt"]).tolist()
        for i in range(n):
            length = round(shortest + (longest - shortest) * i / max(1, n - 1))
            prompts.append(prompt)
            replies.append(random.integers(4, order["vocabulary"], length).tolist())
            groups.append(group)
    order_of = random.permutation(len(replies))
    advantages = random.standard_normal(len(replies)).tolist()
    return Replies(
        [prompts[i] for i in order_of], [replies[i] for i in order_of], advantages, [groups[i] for i in order_of]
    )


def build_model(order: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    heads = max(1, order["hidden"] // 64)
    config = Qwen3Config(
        vocab_size=order["vocabulary"], hidden_size=order["hidden"], intermediate_size=3 * order["hidden"],
        num_hidden_layers=order["layers"], num_attention_heads=heads, num_key_value_heads=max(1, heads // 2),
        head_dim=64, tie_word_embeddings=True, max_position_embeddings=32768, bos_token_id=1, eos_token_id=2,
        pad_token_id=0,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


Step = Callable[[], tuple[float, dict[str, Tensor]]]
"""One gradient of the whole batch: the loss, and gradients by name."""


def ours(order: dict[str, Any], model: Any, replies: Replies, *, checkpointing: bool) -> Step:
    from echo2.learning.advantages import Advantages
    from echo2.learning.batch import TrainingBatch, TrainingRow
    from echo2.learning.objectives import ObjectiveSettings, find_objective
    from echo2.learning.policy_model import PolicyModel
    from echo2.learning.update import UpdateSettings, run_updates

    class Keeper(torch.optim.SGD):
        """Keeps gradients instead of applying them."""

        def step(self, closure: Any = None) -> None:
            self.kept = {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}

    policy = PolicyModel(model, compute_dtype="float32", logits_chunk_tokens=0, activation_checkpointing=checkpointing)
    rows = []
    for i, (prompt, reply) in enumerate(zip(replies.prompts, replies.replies, strict=True)):
        tokens = np.asarray(prompt + reply, np.int64)
        rows.append(
            TrainingRow(
                replies.groups[i], tokens, np.arange(len(tokens)) >= len(prompt), None, replies.advantages[i], 1.0,
                current=True, nucleus=False,
            )
        )  # fmt: skip
    normalised = Advantages(np.asarray(replies.advantages, np.float32), np.ones(len(rows), bool), order["groups"], 0, 0)
    batch = TrainingBatch(tuple(rows), normalised, 0, 0, 0, 0)
    keeper = Keeper(policy.parameters().values(), lr=1.0)
    settings = UpdateSettings(find_objective("grpo"), ObjectiveSettings(), 1, order["budget"], 0.0)

    def step() -> tuple[float, dict[str, Tensor]]:
        found = run_updates(batch, policy, None, keeper, settings)
        kept, keeper.kept = keeper.kept, {}
        return found["loss"], kept

    return step


def trl(order: dict[str, Any], model: Any, replies: Replies, *, checkpointing: bool) -> Step:
    from datasets import Dataset  # type: ignore[import-not-found]
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    width, rows = order["prompt"] + order["longest"], len(replies.replies)
    fits = max(1, order["budget"] // width)
    per_micro = next(b for b in range(min(fits, rows), 0, -1) if rows % b == 0)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2})), pad_token="<pad>", eos_token="</s>"
    )
    folder = tempfile.mkdtemp()
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, report_to=[], loss_type="dapo", beta=0.0, temperature=1.0,
        gradient_checkpointing=checkpointing, per_device_train_batch_size=per_micro, num_generations=order["n"],
        gradient_accumulation_steps=rows // per_micro, max_completion_length=order["longest"],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=model, args=config, processing_class=tokenizer, reward_funcs=lambda completions, **_: [0.0],
        train_dataset=Dataset.from_dict({"prompt": ["a"] * rows}),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = rows // per_micro
    trainer.args.steps_per_generation = rows // per_micro
    model.train()
    if checkpointing and not model.is_gradient_checkpointing:
        # Of some versions the constructor does it, of others only train(), which is not called here.
        model.gradient_checkpointing_enable(config.gradient_checkpointing_kwargs)
    if model.is_gradient_checkpointing is not checkpointing:
        raise RuntimeError(f"gradient checkpointing must be {checkpointing}, the model says otherwise")

    def padded(lists: list[list[int]], left: bool) -> tuple[Tensor, Tensor]:
        longest = max(map(len, lists))
        ids, mask = (
            torch.zeros(len(lists), longest, dtype=torch.long),
            torch.zeros(len(lists), longest, dtype=torch.long),
        )
        for i, tokens in enumerate(lists):
            where = slice(longest - len(tokens), longest) if left else slice(0, len(tokens))
            ids[i, where], mask[i, where] = torch.tensor(tokens), 1
        return ids, mask

    prompt_ids, prompt_mask = padded(replies.prompts, left=True)
    reply_ids, reply_mask = padded(replies.replies, left=False)
    advantages = torch.tensor(replies.advantages)

    def step() -> tuple[float, dict[str, Tensor]]:
        model.zero_grad(set_to_none=True)
        loss = 0.0
        for first in range(0, rows, per_micro):
            these = slice(first, first + per_micro)
            inputs = {
                "prompt_ids": prompt_ids[these], "prompt_mask": prompt_mask[these],
                "completion_ids": reply_ids[these], "completion_mask": reply_mask[these],
                "advantages": advantages[these], "num_items_in_batch": reply_mask.sum(),
            }  # fmt: skip
            part = trainer._compute_loss(model, inputs)
            part.backward()
            loss += float(part.detach())
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        return loss, gradients

    return step


CONTENDERS: dict[str, tuple[Callable[..., Step], bool]] = {
    "ours": (ours, False),
    "ours_checkpointing": (ours, True),
    "trl": (trl, False),
    "trl_checkpointing": (trl, True),
}


def memory_mib(field: str) -> float:
    facts = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
    return int(facts[field].split()[0]) / 1024


def main() -> None:
    title, order = sys.argv[1], json.loads(sys.argv[2])
    torch.set_num_threads(order["threads"])
    replies, model = draw(order), build_model(order)
    make, checkpointing = CONTENDERS[title]
    step = make(order, model, replies, checkpointing=checkpointing)
    loss, gradients = step()
    save_file({name: value.float().contiguous() for name, value in gradients.items()}, order["gradients"])
    del gradients
    held_mib = memory_mib("VmRSS")
    REFERENCES.write_text("5")
    seconds, cpu = [], []
    for _ in range(order["repeat"]):
        began_s, used_s = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - began_s)
        cpu.append(time.process_time() - used_s)
    took_s = statistics.median(seconds)
    found = {
        "tokens_per_s": round(replies.targets / took_s, 1), "seconds": [round(s, 2) for s in seconds],
        "cpu_s": round(statistics.median(cpu), 2),
        "targets": replies.targets, "peak_mib": round(memory_mib("VmHWM") - held_mib),
        "process_mib": round(memory_mib("VmHWM")), "loss": loss,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()

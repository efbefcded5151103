"""One training step on a GPU, as the learner does it: tokens per second, model FLOPs utilisation, peak memory.

    python -m bench.gpu_step [--shape 0.6b 4b] [--compile]           # where a GPU is; under four minutes
    python -m bench.gpu_step --cpu --layers 2 --hidden 128           # the very same code where none is

Models have the shape and vocabulary of Qwen3-0.6B and Qwen3-4B with random weights: passes in bfloat16, weights and
AdamW in float32, activations computed again for 4B. A batch is --groups prompts with --n replies each, whose lengths
are drawn from a log-normal distribution cut at --longest, as reasoning replies are. The first step warms up (and
compiles); of the others the medians count. ``step`` is what ``run_updates`` says of itself, so MFU counts no detour as
work.

``snapshot_first_s`` and ``snapshot_s`` are copies of weights and optimizer to host memory, which is all that a publish
takes of training; the first also has the memory made. ``generate`` is the embedded engine with the same weights, of the
smaller model. Prints one JSON object, or why there is none. Without a GPU it ends with 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from echo2.broadcast.pack import pack_directory
from echo2.config.sections import LearningSection
from echo2.learning.accounting import settle
from echo2.learning.advantages import Advantages
from echo2.learning.batch import TrainingBatch, TrainingRow
from echo2.learning.checkpoint import LearnerState
from echo2.learning.frozen import Freezer
from echo2.learning.objectives import ObjectiveSettings, find_objective
from echo2.learning.optimizer import build_optimizer, optimizer_tensors
from echo2.learning.policy_model import PolicyModel
from echo2.learning.update import UpdateSettings, run_updates
from echo2.rollout.engines.transformers import TransformersEngine
from echo2.types import Policy, Sampling

SHAPES: dict[str, dict[str, int]] = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
CHECKPOINTED = ("4b",)
VOCABULARY = 151_936
KEPT = ("tokens_per_s", "mfu", "pack_s", "prox_s", "update_s", "optimizer_s", "trainable_tokens", "padded_tokens",
        "memory_splits")  # fmt: skip


def configuration(name: str, chosen: argparse.Namespace) -> Qwen3Config:
    shape = dict(SHAPES[name])
    if chosen.layers:
        shape["num_hidden_layers"] = chosen.layers
    if chosen.hidden:
        shape |= {"hidden_size": chosen.hidden, "intermediate_size": 3 * chosen.hidden, "num_attention_heads": 8}
    return Qwen3Config(
        **shape, num_key_value_heads=8, head_dim=128 if not chosen.hidden else max(8, chosen.hidden // 8),
        vocab_size=chosen.vocabulary, tie_word_embeddings=True, max_position_embeddings=40_960, bos_token_id=1,
        eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def batch_of(chosen: argparse.Namespace) -> TrainingBatch:
    random = np.random.default_rng(0)
    rows = []
    for group in range(chosen.groups):
        prompt = random.integers(4, chosen.vocabulary, chosen.prompt)
        for _ in range(chosen.n):
            length = int(np.clip(random.lognormal(np.log(chosen.longest / 3), 0.7), 8, chosen.longest))
            tokens = np.concatenate([prompt, random.integers(4, chosen.vocabulary, length)])
            loss = np.arange(len(tokens)) >= len(prompt)
            behaviour = np.where(loss, -np.log(chosen.vocabulary), 0.0).astype(np.float32)
            advantage = float(random.standard_normal())
            rows.append(TrainingRow(group, tokens, loss, behaviour, advantage, 1.0, current=True, nucleus=False))
    values = np.asarray([row.advantage for row in rows], np.float32)
    return TrainingBatch(tuple(rows), Advantages(values, np.ones(len(rows), bool), chosen.groups, 0, 0), 0, 0, 0, 0)


def measured(name: str, device: torch.device, chosen: argparse.Namespace) -> dict[str, Any]:
    torch.manual_seed(0)
    with device:
        model = Qwen3ForCausalLM(configuration(name, chosen))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    policy = PolicyModel(
        model, compute_dtype="bfloat16", logits_chunk_tokens=0, activation_checkpointing=name in CHECKPOINTED,
        compiles=chosen.compile,
    )  # fmt: skip
    optimizer = build_optimizer(policy.parameters(), LearningSection())
    settings = UpdateSettings(find_objective("grpo"), ObjectiveSettings(), 2, chosen.budget, 1.0)
    batch = batch_of(chosen)
    took_s, told = [], []
    for _ in range(1 + chosen.repeat):
        began_s = time.perf_counter()
        told.append(run_updates(batch, policy, None, optimizer, settings))
        settle(device)
        took_s.append(time.perf_counter() - began_s)
    found = {
        "parameters": sum(value.numel() for value in policy.parameters().values()),
        "compute_dtype": str(policy.compute_dtype).removeprefix("torch."),
        "shares_prefixes": policy.shares_prefixes,
        "first_step_s": round(took_s[0], 3),
        "step_s": round(statistics.median(took_s[1:]), 3),
        "step": {key: statistics.median(one[key] for one in told[1:]) for key in KEPT},
    }
    if device.type == "cuda":
        found["peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
        found["peak_reserved_gib"] = round(torch.cuda.max_memory_reserved(device) / 2**30, 2)
    found |= copied(policy, optimizer)
    if chosen.generate and name not in CHECKPOINTED:
        found["generate"] = asyncio.run(generated(model, device, chosen))
    return found


def copied(policy: PolicyModel, optimizer: torch.optim.Optimizer) -> dict[str, float]:
    freezer, state = Freezer(), LearnerState(1, "", "", "", "bench")
    moments = optimizer_tensors(optimizer, policy.parameters())
    seconds = []
    for _ in range(2):
        began_s = time.perf_counter()
        frozen = freezer.freeze(state, policy.stored(), policy.aliases, moments)
        seconds.append(time.perf_counter() - began_s)
        held = sum(value.nbytes for value in (*frozen.weights.values(), *frozen.optimizer.values()))
        del frozen
    return {"snapshot_first_s": round(seconds[0], 3), "snapshot_s": round(seconds[1], 3), "snapshot_gb": held / 1e9}


async def generated(model: Any, device: torch.device, chosen: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as scratch:
        folder, snapshot = Path(scratch) / "model", Path(scratch) / "snapshot"
        model.to(torch.bfloat16).save_pretrained(folder)
        manifest = pack_directory(folder, snapshot, policy=Policy(0, 0))
        engine = TransformersEngine(folder, device=str(device), dtype=manifest.dtype)
        await engine.prefetch(Policy(0, 0), snapshot)
        await engine.activate(Policy(0, 0))
        prompt = list(range(4, 4 + chosen.prompt))
        await engine.generate(prompt, Sampling(1.0, 1.0, 2, 0, ()), 2)
        began_s = time.perf_counter()
        sampling = [Sampling(1.0, 1.0, chosen.new_tokens, seed, ()) for seed in range(chosen.groups)]
        groups = await asyncio.gather(*(engine.generate(prompt, one, chosen.n) for one in sampling))
        took_s = time.perf_counter() - began_s
        await engine.close()
    tokens = sum(len(reply.token_ids) for group in groups for reply in group)
    return {"tokens_per_s": round(tokens / took_s, 1), "tokens": tokens, "seconds": round(took_s, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", choices=sorted(SHAPES), default=list(SHAPES))
    parser.add_argument("--compile", action="store_true", help="compile the model's blocks")
    parser.add_argument("--cpu", action="store_true", help="measure this processor instead of a GPU")
    parser.add_argument("--layers", type=int, help="of a model of another depth")
    parser.add_argument("--hidden", type=int, help="of a model of another width")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--n", type=int, default=8, help="replies of a group")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--longest", type=int, default=2048, help="tokens of a reply")
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens that the engine generates for each reply")
    parser.add_argument("--generate", action=argparse.BooleanOptionalAction, default=True)
    chosen = parser.parse_args()
    if not chosen.cpu and not torch.cuda.is_available():
        print(json.dumps({"skipped": "no GPU is present; --cpu --layers 2 --hidden 128 runs the same code here"}))
        return
    device = torch.device("cpu" if chosen.cpu else "cuda")
    found: dict[str, Any] = {
        "device": "cpu" if chosen.cpu else torch.cuda.get_device_name(device),
        "compile": chosen.compile,
        "batch": {key: getattr(chosen, key) for key in ("groups", "n", "prompt", "longest", "budget")},
    }
    for name in chosen.shape:
        found[name] = measured(name, device, chosen)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()

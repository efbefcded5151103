"""Tokens per second and peak memory of a training step's gradient, beside TRL's ``GRPOTrainer`` on the same batch.

    python -m bench.learner [--trl-python PYTHON] [--longest 128 256 512] [--layers 4] [--hidden 256]

The model has Qwen3's shape and vocabulary, 151,936 tokens, with random weights. A batch is --groups prompts with --n
replies each, whose lengths are spread evenly from an eighth of ``longest`` to ``longest``; advantages are drawn. Every
contender is a process of its own that makes model and batch from the same seeds, does the batch once to warm up and
then --repeat times: all micro-batches forward and backward, no optimizer. ``trl`` calls the trainer's own loss on the
batch as its trainer would collate it: padded to the longest prompt and the longest reply, in micro-batches of as many
rows as the same token budget holds. ``_checkpointing`` is either with activations computed again: ours by
``learning.activation_checkpointing``, TRL's by its default.

On a machine that does other things besides, trust the ratio of CPU time (of all threads) more than that of speed. Peak
memory is the process's, from the kernel, counted above what it held with the model loaded. Prints one JSON object:
medians, ratios, and the largest difference of loss and gradient from ours, relative to a tensor's largest gradient.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

CHILD = "bench.learner_contender"
CONTENDERS = ("ours", "ours_checkpointing", "trl", "trl_checkpointing")


def run(title: str, python: str, order: dict[str, Any]) -> dict[str, Any]:
    """Figures of one contender, or why there are none."""
    said = subprocess.run(
        [python, "-m", CHILD, title, json.dumps(order)], capture_output=True, text=True, check=False, timeout=3600
    )
    if said.returncode:
        return {"failed": (said.stderr.strip().splitlines() or [f"exit code {said.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(said.stdout.splitlines()[-1])
    return found


def difference(one: Path, other: Path) -> float:
    """Largest over the tensors of max|a - b| / max|a|."""
    ours, theirs = load_file(one), load_file(other)
    if ours.keys() != theirs.keys():
        raise ValueError(f"the gradients are of other tensors: {sorted(ours.keys() ^ theirs.keys())[:3]}")
    return max(
        float((ours[name] - theirs[name]).abs().max() / ours[name].abs().max().clamp(min=1e-30)) for name in ours
    )


def compare(longest: int, chosen: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    order = vars(chosen) | {"longest": longest, "trl_python": None}
    found: dict[str, Any] = {}
    for title in CONTENDERS if chosen.only is None else chosen.only:
        python = sys.executable if title.startswith("ours") or chosen.trl_python is None else str(chosen.trl_python)
        gradients = scratch / f"{title}.safetensors"
        found[title] = run(title, python, order | {"gradients": str(gradients)})
        if title != "ours" and gradients.exists() and (scratch / "ours.safetensors").exists():
            found[title]["gradient_difference"] = difference(scratch / "ours.safetensors", gradients)
            found[title]["loss_difference"] = abs(found[title]["loss"] - found["ours"]["loss"])
        print(f"longest {longest}: {title} {found[title]}", file=sys.stderr)
    ours = found.get("ours", {})
    for title, figures in found.items():
        if title != "ours" and "failed" not in figures and "tokens_per_s" in ours:
            figures["our_speed_over_it"] = round(ours["tokens_per_s"] / figures["tokens_per_s"], 2)
            figures["its_cpu_time_over_ours"] = round(figures["cpu_s"] / ours["cpu_s"], 2)
            figures["our_peak_over_it"] = round(ours["peak_mib"] / figures["peak_mib"], 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="an interpreter with trl and this project's dependencies")
    parser.add_argument("--only", nargs="+", choices=CONTENDERS)
    parser.add_argument("--longest", type=int, nargs="+", default=[128, 256, 512])
    parser.add_argument("--prompt", type=int, default=96, help="tokens of a prompt")
    parser.add_argument("--groups", type=int, default=2)
    parser.add_argument("--n", type=int, default=8, help="replies of a group")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    results = {}
    for longest in chosen.longest:
        with tempfile.TemporaryDirectory() as scratch:
            results[str(longest)] = compare(longest, chosen, Path(scratch))
    shape = {name: getattr(chosen, name) for name in ("groups", "n", "prompt", "budget", "layers", "hidden", "threads")}
    print(json.dumps(shape | {"longest": results}, indent=1))


if __name__ == "__main__":
    main()

"""The tiny demo's model and settings under every objective, for three steps on data that grow stale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trajectories import batch_of, trajectory

from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.config.load import load_config
from echo2.config.root import Config
from echo2.learning.learner import TorchLearner
from echo2.learning.objectives import OBJECTIVES
from echo2.learning.pretrained import resolve_model
from echo2.transport.messages import BatchReply
from echo2.types import Trajectory

DEMO = Path(__file__).parents[2] / "examples" / "demo" / "tiny.toml"
REPLY_TOKENS = 4


def write(
    tensors: Mapping[str, tuple[str, tuple[int, ...], memoryview]], aliases: Mapping[str, str], **rest: Any
) -> Any:
    return write_snapshot({name: RawTensor(*tensor) for name, tensor in tensors.items()}, aliases, **rest)


def demo(**learning: Any) -> Config:
    overrides = [f"learning.{key}={value}" for key, value in learning.items()]
    return load_config(DEMO, ["model.warm_start_steps=0", "learning.device=cpu", *overrides])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model(demo().model, tmp_path_factory.mktemp("demo"), seed=0)


@torch.no_grad()
def sampled(model: Any, prompt: list[int], draw: torch.Generator) -> Trajectory:
    """A reply of version 0 with its log-probs; rewarded for its parity, so that groups differ."""
    reply: list[int] = []
    logprobs: list[float] = []
    for _ in range(REPLY_TOKENS):
        logp: Tensor = model(torch.tensor([prompt + reply])).logits[0, -1].float().log_softmax(-1)
        token = int(torch.multinomial(logp.exp(), 1, generator=draw))
        reply.append(token)
        logprobs.append(float(logp[token]))
    return trajectory(prompt, reply, float(sum(reply) % 2), logprobs=logprobs, version=0)


@pytest.fixture(scope="module")
def batches(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[BatchReply]:
    folder = tmp_path_factory.mktemp("sampler")
    learner = TorchLearner.open(demo(), folder, "run", resume=False, write_snapshot=write, model_dir=model_dir)
    draw = torch.Generator().manual_seed(0)
    model = learner._policy.model
    return [
        batch_of({group: [sampled(model, [5 + group, 9, 7], draw) for _ in range(4)] for group in range(4)}, step)
        for step in range(3)
    ]


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
async def test_the_tiny_demo_trains_three_steps(
    objective: str, batches: list[BatchReply], model_dir: Path, tmp_path: Path
) -> None:
    config = demo(objective=objective, kl_beta=0.01)
    learner = TorchLearner.open(config, tmp_path, "run", resume=False, write_snapshot=write, model_dir=model_dir)
    for step, batch in enumerate(batches):
        before = {name: value.detach().clone() for name, value in learner._policy.parameters().items()}
        statistics = await learner.train_step(batch)
        assert learner.step == step + 1
        assert statistics["updates"] == 2
        assert statistics["grad_norm"] > 0
        assert all(math.isfinite(value) for value in statistics.values())
        after = learner._policy.parameters()
        assert all(bool(torch.isfinite(value).all()) for value in after.values())
        assert not all(torch.equal(after[name], value) for name, value in before.items())

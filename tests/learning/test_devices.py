"""Which device a learner computes on, and a short check of the GPU path where a GPU is present."""

from __future__ import annotations

import pytest
import torch
from trajectories import policy_of, some_batch, tiny_qwen3

from echo2.config.sections import LearningSection
from echo2.errors import ConfigError
from echo2.learning.batch import BatchRules, form_training_batch
from echo2.learning.checkpoint import LearnerState
from echo2.learning.frozen import Freezer
from echo2.learning.objectives import OBJECTIVES, ObjectiveSettings
from echo2.learning.optimizer import build_optimizer, optimizer_tensors
from echo2.learning.packing import pack
from echo2.learning.policy_model import PolicyModel, pick_device
from echo2.learning.torch_ranks import own_gpu
from echo2.learning.update import UpdateSettings, run_updates

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


def test_the_first_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 0)
    assert pick_device("auto") == torch.device("cpu")
    gpus(monkeypatch, 4)
    assert pick_device("auto") == torch.device("cuda")
    assert pick_device("cuda:3") == torch.device("cuda", 3)


def test_each_rank_takes_the_gpu_of_its_number_on_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus(monkeypatch, 4)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        assert own_gpu(pick_device("auto")) == torch.device("cuda", rank)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(ConfigError, match="this machine has 4 and rank 4 of it has none"):
        own_gpu(pick_device("auto"))
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda where several ranks train, got cuda:2"):
        own_gpu(pick_device("cuda:2"))


@needs_gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_has_the_log_probs_and_gradients_of_the_processor(dtype: str) -> None:
    plain = policy_of(tiny_qwen3())
    there = PolicyModel(tiny_qwen3().to("cuda"), compute_dtype=dtype, logits_chunk_tokens=0)
    tolerance = {"rtol": 1e-3, "atol": 1e-3} if dtype == "float32" else {"rtol": 0.1, "atol": 0.1}
    batch = form_training_batch(some_batch(), BatchRules())
    for share in (True, False):
        for micro in pack(batch.rows, budget=1000, share_prefixes=share):
            (logp, _), (found, _) = plain.logprobs(micro), there.logprobs(micro.to(there.device))
            torch.testing.assert_close(found.detach().cpu(), logp.detach(), **tolerance)
            (logp.sum() / 100).backward()  # type: ignore[no-untyped-call]
            (found.sum() / 100).backward()  # type: ignore[no-untyped-call]
    for name, value in plain.parameters().items():
        grad = there.parameters()[name].grad
        assert grad is not None and value.grad is not None
        torch.testing.assert_close(grad.cpu(), value.grad, **tolerance)


@needs_gpu
def test_a_step_on_a_gpu_is_timed_and_frozen_into_pinned_memory() -> None:
    policy = PolicyModel(tiny_qwen3().to("cuda"), compute_dtype="bfloat16", logits_chunk_tokens=0)
    optimizer = build_optimizer(policy.parameters(), LearningSection())
    given = UpdateSettings(OBJECTIVES["grpo"], ObjectiveSettings(), 2, 1000, 1.0)
    told = run_updates(form_training_batch(some_batch(), BatchRules()), policy, None, optimizer, given)
    assert told["updates"] == 2 and 0 < told["mfu"] < 1
    moments = optimizer_tensors(optimizer, policy.parameters())
    frozen = Freezer().freeze(LearnerState(1, "", "", "", "r"), policy.stored(), policy.aliases, moments)
    assert all(value.is_pinned() for name, value in frozen.weights.items())
    assert all(torch.equal(value, policy.stored()[name].cpu()) for name, value in frozen.weights.items())

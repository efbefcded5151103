"""Compiled blocks compute what plain ones do, whatever lengths a batch packs to."""

from __future__ import annotations

import pytest
import torch
from trajectories import policy_of, some_batch, tiny_qwen3

from echo2.errors import UserError
from echo2.learning.batch import BatchRules, form_training_batch
from echo2.learning.compiled import compile_blocks
from echo2.learning.packing import pack
from echo2.learning.policy_model import PolicyModel

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, while it traces


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch.compiler.reset()


def require_agreement(plain: PolicyModel, fast: PolicyModel) -> None:
    """Losses and gradients of batches of several shapes, shared prompts and not."""
    for groups, budget in ((4, 1000), (3, 40), (5, 1000), (2, 20)):
        batch = form_training_batch(some_batch(groups, groups=groups), BatchRules())
        for share in (True, False):
            for micro in pack(batch.rows, budget=budget, share_prefixes=share):
                losses = []
                for policy in (plain, fast):
                    logp, _ = policy.logprobs(micro)
                    loss = -(logp * micro.advantages).sum() / micro.targets
                    loss.backward()  # type: ignore[no-untyped-call]
                    losses.append(loss.detach())
                torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-5)
    for name, value in plain.parameters().items():
        found = fast.parameters()[name].grad
        assert found is not None and value.grad is not None
        torch.testing.assert_close(found, value.grad, rtol=1e-5, atol=1e-5)


def programs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("again", [False, True])
def test_traced_blocks_are_not_traced_again_for_other_lengths(again: bool) -> None:
    plain = PolicyModel(tiny_qwen3(), compute_dtype="float32", logits_chunk_tokens=7, activation_checkpointing=again)
    model = tiny_qwen3()
    fast = PolicyModel(model, compute_dtype="float32", logits_chunk_tokens=7)
    before = programs()
    compile_blocks(model, torch.device("cpu"), backend="aot_eager")
    require_agreement(plain, fast)
    traced = programs() - before
    require_agreement(plain, fast)
    assert 2 <= traced <= 6, "with and without mask, for one row and several; never one per length"
    assert programs() - before == traced


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("again", [False, True])
def test_compiled_blocks_have_the_losses_and_gradients_of_plain_ones(again: bool) -> None:
    plain = policy_of(tiny_qwen3())
    fast = PolicyModel(
        tiny_qwen3(), compute_dtype="float32", logits_chunk_tokens=1024, activation_checkpointing=again, compiles=True
    )
    assert programs() > 0, "the test for a compiler"
    require_agreement(plain, fast)


def test_without_a_compiler_the_start_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object, **__: object) -> object:
        raise RuntimeError("long words\nInvalidCxxCompiler: No working C++ compiler found\n")

    monkeypatch.setattr(torch, "compile", absent)
    with pytest.raises(UserError, match=r"needs a C\+\+ compiler .* failed: InvalidCxxCompiler: No working C\+\+"):
        PolicyModel(tiny_qwen3(), compute_dtype="float32", logits_chunk_tokens=0, compiles=True)

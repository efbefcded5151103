"""Log-probs and entropy of sampled tokens, without the [tokens × vocabulary] logits.

Invariant: at no time do logits of more than ``chunk`` tokens exist, forward or backward; backward computes each chunk's
again. Logits are divided by the temperature *before* the softmax (field report C06), and everything after the matrix
product is float32, or float64 where the hidden states are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sampled_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, *, chunk: int
) -> tuple[Tensor, Tensor]:
    """Log-softmax of (hidden·weightᵀ + bias)/temperature at the targets, and the entropy of that distribution.

    hidden: [T, H] last hidden states.  weight: [V, H].  bias: [V] or None.  targets: [T] int64.  temperature: [T].
    Returns [T] float32 log-probs, differentiable in hidden, weight and bias, and [T] float32 entropies in nats,
    without gradient; both are float64 where hidden is.
    """
    wide = _wide(hidden)
    if targets.numel() == 0:
        # Still connected to everything: the gradient of an empty micro-batch is zero, not absent. Ranks that sum
        # gradients must all have the same ones.
        nothing = hidden.to(wide) @ weight[0].to(wide)
        return nothing if bias is None else nothing + bias[0].to(wide), hidden.new_zeros(0, dtype=wide)
    logp, entropy = _SampledLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, temperature.to(wide), chunk
    )
    return logp, entropy


def _wide(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _operand(weight: Tensor, hidden: Tensor) -> Tensor:
    """[V, H] in the type of the products: that of the hidden states on a GPU, whose half-precision products accumulate
    and return float32; elsewhere the wide one. Cast once for all chunks."""
    return weight.to(hidden.dtype if hidden.is_cuda else _wide(hidden))


def _scaled_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor) -> Tensor:
    """[C, V] in the wide type. weight: as ``_operand`` gives it."""
    wide = _wide(hidden)
    if weight.dtype is not wide:
        logits = torch.mm(hidden, weight.T, out_dtype=wide)
    else:
        logits = torch.mm(hidden.to(wide), weight.T)
    if bias is not None:
        logits += bias.to(wide)
    return logits.div_(temperature[:, None])


class _SampledLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: Tensor, chunk: int
    ) -> tuple[Tensor, Tensor]:
        logp = torch.empty(targets.shape, dtype=_wide(hidden), device=hidden.device)
        entropy = torch.empty_like(logp)
        operand = _operand(weight, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in _pieces(targets.numel(), chunk):
                logits = _scaled_logits(hidden[piece], operand, bias, temperature[piece])
                log_total = logits.logsumexp(dim=-1)
                logp[piece] = logits.gather(1, targets[piece, None]).squeeze(1) - log_total
                # Entropy = log Σe^z - Σ p·z, with p made in place of what is no longer needed.
                share = (logits - log_total[:, None]).exp_()
                entropy[piece] = log_total - share.mul_(logits).sum(dim=-1)
        ctx.save_for_backward(hidden, weight, bias, targets, temperature)
        ctx.chunk = chunk
        ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    def backward(ctx: Any, grad_logp: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, temperature = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        wide = _wide(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wants_bias else None
        operand = _operand(weight, hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            for piece in _pieces(targets.numel(), ctx.chunk):
                logits = _scaled_logits(hidden[piece], operand, bias, temperature[piece])
                scale = grad_logp[piece] / temperature[piece]
                # d logp/d z = (one-hot - softmax)/T
                slope = torch.softmax(logits, dim=-1).mul_(-scale[:, None])
                slope.scatter_add_(1, targets[piece, None], scale[:, None])
                if grad_bias is not None:
                    grad_bias += slope.sum(dim=0)
                narrow = slope.to(operand.dtype)
                if grad_hidden is not None:
                    grad_hidden[piece] = (narrow @ operand).to(hidden.dtype)
                if grad_weight is None:
                    continue
                if operand.dtype is wide:
                    grad_weight.addmm_(slope.T, hidden[piece].to(wide))
                else:  # a float32 product would take fifteen times as long; chunks still add up in float32
                    grad_weight += torch.mm(narrow.T, hidden[piece], out_dtype=wide)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _pieces(total: int, chunk: int) -> list[slice]:
    return [slice(first, min(first + chunk, total)) for first in range(0, total, chunk)]

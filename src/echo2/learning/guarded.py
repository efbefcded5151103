"""Passes of a split model in which one rank may run out of memory while the others wait for its part.

Invariant: no want of memory leaves a block as an exception, forward or backward. The rank that is struck goes on
through the rest of the pass with whatever tensors it has, so every collective happens on every rank and in the same
order; what comes out is worthless, and ``Watch.agree`` lets all of them drop it. Only what no block computes (making
weights whole, adding gradients up, the input embedding's gradient) may still fail, and then ends the rank.

Weights that should have got a gradient get one of zeros, because ranks that sum gradients must all have the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from echo2.learning.packing import MicroBatch, empty_micro_batch
from echo2.learning.shortage import Watch

Parameters = Callable[[], Sequence[nn.Parameter]]


class _Guarded(torch.autograd.Function):
    """``run`` with a graph of its own, which backward walks where a shortage can be caught."""

    @staticmethod
    def forward(
        ctx: Any, entered: Tensor, _: Tensor, run: Callable[[Tensor], Tensor], watch: Watch, parameters: Parameters
    ) -> Tensor:
        ctx.watch, ctx.parameters = watch, parameters
        with torch.enable_grad():
            ctx.inner = entered.detach().requires_grad_(entered.requires_grad)
            ctx.left = run(ctx.inner)
        return ctx.left.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, left = ctx.inner, ctx.left
        ctx.inner = ctx.left = None
        shape = inner.shape
        with ctx.watch.catching():
            if not ctx.watch.struck and left.requires_grad:  # none before the first adapter beside frozen weights
                torch.autograd.backward(left, grad)
        found = inner.grad
        if ctx.watch.struck:
            del inner, left
            for parameter in ctx.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            # Of the right shape, whatever it says: it costs nothing where it can be used again.
            found = grad if grad.shape == shape else grad.new_zeros(shape)
        return found, None, None, None, None


class Guards:
    """Around the blocks of one model and what follows them."""

    def __init__(self, watch: Watch, device: torch.device) -> None:
        self._watch = watch
        watch.guarded = True
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._begun = 0
        """Blocks of the running pass."""
        self._tuples = False
        """Blocks give their hidden states as the first of several things."""

    def around(self, block: nn.Module) -> None:
        """Replace the block's forward pass; before its weights are split."""
        inner = block.forward

        def forward(entered: Tensor, *rest: Any, **named: Any) -> Any:
            self._begun += 1
            beside: list[Any] = []

            def run(hidden: Tensor) -> Tensor:
                found = inner(hidden, *rest, **named)
                if isinstance(found, tuple):
                    self._tuples = True
                    found, *beside[:] = found
                return found  # type: ignore[no-any-return]

            left = entered if self._watch.struck else self._kept(entered, run, lambda: list(block.parameters()))
            return (left, *beside) if self._tuples else left

        block.forward = forward

    def whole(
        self,
        body: Callable[[MicroBatch], Tensor],
        tail: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]],
        head: nn.Module,
    ) -> Callable[[MicroBatch], tuple[Tensor, Tensor]]:
        """body: micro-batch → last hidden states, through all blocks.  tail: to log-probs and entropies."""

        def compute(micro: MicroBatch) -> tuple[Tensor, Tensor]:
            self._begun = 0
            hidden: Tensor | None = None
            with self._watch.catching():
                hidden = body(micro)
            if not self._begun:
                body(empty_micro_batch().to(micro.tokens.device))  # the others wait in each block
            entropies: list[Tensor] = []

            def run(entered: Tensor) -> Tensor:
                logp, entropy = tail(micro, entered)
                entropies.append(entropy)
                return logp

            if hidden is not None and not self._watch.struck:
                logp: Tensor = self._kept(hidden, run, lambda: list(head.parameters()))
                if entropies:
                    return logp, entropies.pop()
            nothing = torch.zeros(micro.targets, device=micro.tokens.device)
            return nothing, nothing

        return compute

    def _kept(self, entered: Tensor, run: Callable[[Tensor], Tensor], parameters: Parameters) -> Tensor:
        left = entered
        with self._watch.catching():
            if torch.is_grad_enabled():
                left = _Guarded.apply(entered, self._anchor, run, self._watch, parameters)  # type: ignore[no-untyped-call]
            else:
                left = run(entered)
        return left

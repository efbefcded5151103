"""Memory that runs out in the middle of a pass.

Invariant: a shortage changes what a step costs, never its numbers. What was computed when it struck is dropped whole,
on all ranks alike, and computed again from smaller micro-batches; that size then holds for every later step. A
trajectory that does not fit alone ends the learner with a sentence.

A rank that runs short must not leave the others waiting inside a collective: where weights are split, its blocks
swallow the failure and go on (``guarded.py``), and after each pass all ranks hear of it here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import msgspec
import torch

from echo2.errors import Echo2Error, UserError
from echo2.learning.packing import MicroBatch
from echo2.learning.ranks import Ranks

LOG = logging.getLogger(__name__)

T = TypeVar("T")


class Short(msgspec.Struct, frozen=True):
    """The micro-batch that did not fit on one rank."""

    tokens: int
    """Padding included."""
    rows: int


class TooLarge(Exception):
    """Some rank's memory was short; every rank raises it with the same content."""

    def __init__(self, struck: Sequence[Short]) -> None:
        super().__init__(f"{len(struck)} ranks ran out of memory")
        self.struck = struck


class Watch:
    """What one rank knows of its own shortages."""

    def __init__(self) -> None:
        self.struck = False
        self.guarded = False
        """Other ranks are in the same pass, which guards see to."""

    @contextmanager
    def noticing(self) -> Iterator[None]:
        """Around a pass: what runs out of memory is broken off and remembered. Where others are in the pass too, an
        exception means that they wait in vain, and it goes on."""
        try:
            yield
        except torch.OutOfMemoryError:
            if self.guarded:
                raise
            self.struck = True

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Inside a guard."""
        try:
            yield
        except torch.OutOfMemoryError:
            self.struck = True

    def agree(self, ranks: Ranks, micro: MicroBatch) -> None:
        """After every pass, on every rank. Raises TooLarge on all of them where one was struck at its ``micro``."""
        own = [Short(micro.tokens.numel(), micro.rows)] if self.struck else []
        self.struck = False
        told = ranks.gather(msgspec.msgpack.encode(own))
        struck = [short for one in told for short in msgspec.msgpack.decode(one, type=list[Short])]
        if struck:
            raise TooLarge(struck)


class Budget:
    """Padded tokens of a micro-batch: the configured size until memory says less."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.splits = 0
        """Times that micro-batches were made smaller than they should have been."""

    def lower(self, struck: Sequence[Short]) -> None:
        """Half of what did not fit. Raises UserError where that was a trajectory alone."""
        if alone := [short for short in struck if short.rows <= 1]:
            raise UserError(
                "a trajectory must fit into the learner's memory alone, and one of"
                f" {max(short.tokens for short in alone)} tokens does not: lower rollout.max_new_tokens, set"
                " learning.activation_checkpointing, or have more GPUs share the model (learning.ranks)"
            )
        self.tokens = max(1, min(self.tokens, max(short.tokens for short in struck)) // 2)
        self.splits += 1
        LOG.warning(
            "memory ran out; micro-batches have at most %d tokens from now on: set learning.micro_batch_tokens to that",
            self.tokens,
        )


def until_it_fits(work: Callable[[], T], budget: Budget, undo: Callable[[], None]) -> T:
    """``work``, again with a lower budget as often as it raises TooLarge; ``undo`` drops what it left.

    Raises UserError where a trajectory does not fit alone.
    """
    while True:
        try:
            return work()
        except TooLarge as shortage:
            struck = shortage.struck
        # Outside the handler: what the failed attempt held is free only now.
        undo()
        budget.lower(struck)


def out_of_memory(budget: Budget) -> Echo2Error:
    """What ends a rank whose memory ran out where no smaller micro-batch can be tried; not on all ranks alike."""
    return Echo2Error(
        "memory must hold weights, gradients and a micro-batch, and it ran out between them: lower"
        f" learning.micro_batch_tokens below {budget.tokens}, set learning.activation_checkpointing, or have more GPUs"
        " share the model (learning.ranks)"
    )


def release(device: torch.device) -> None:
    """Give cached blocks back, whose sizes the next attempt does not ask for."""
    if device.type == "cuda":
        torch.cuda.empty_cache()

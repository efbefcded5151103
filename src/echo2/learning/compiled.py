"""A model's blocks compiled (``torch.compile``), each pass of theirs as fewer and larger kernels.

Invariant: the numbers are those of the plain blocks up to rounding. Sizes are symbols, so one program serves whatever
lengths a batch packs to. A machine that cannot compile says so before anything is trained.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from echo2.errors import UserError
from echo2.learning.policy_model import blocks_of

MOST_PROGRAMS = 64
"""Of one block's code: with and without gradient, mask and autocast, for one row and several, policy and reference."""


def compile_blocks(model: Any, device: torch.device, backend: str = "inductor") -> None:
    """Replace the blocks' forward passes; they are compiled when they first run. Raises UserError.

    device: where they will run.  backend: of torch.compile; another than inductor needs no compiler.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError(
            f"learning.compile needs a model of repeated blocks, and {type(model).__name__} has none: set it to false"
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of parts that it loads
        _require_compiler(device, backend)
        torch._dynamo.config.recompile_limit = max(MOST_PROGRAMS, torch._dynamo.config.recompile_limit)
        for block in blocks:
            block.forward = torch.compile(block.forward, backend=backend, dynamic=True)


def _require_compiler(device: torch.device, backend: str) -> None:
    """Compile something tiny, forward and backward."""
    try:
        value = torch.linspace(0.0, 1.0, 24, device=device, requires_grad=True)
        torch.compile(_tiny, backend=backend)(value).backward()  # type: ignore[no-untyped-call]
    except Exception as error:  # any part of a long chain of tools, in its own words
        said = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), type(error).__name__)
        needs = "a C++ compiler (g++ or clang++)" if device.type == "cpu" else "Triton and a C compiler (gcc)"
        raise UserError(
            f"learning.compile needs {needs} on this machine, and compiling a test failed: {said[:200]};"
            " install what is missing, or set learning.compile to false"
        ) from error


def _tiny(value: torch.Tensor) -> torch.Tensor:
    return (value.sin() * 2.0 + 1.0).sum()

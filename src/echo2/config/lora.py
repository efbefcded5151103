"""The keys of low-rank adapters (LoRA, arXiv 2106.09685).

Invariant: rank 0 means that all weights are trained, and nothing else here is looked at then.
"""

from __future__ import annotations

from echo2.config.sections import NonNegative, PositiveFloat, Section


class LoraSection(Section):
    """Train adapters beside frozen weights, W + alpha / rank * B A, and publish these alone after version 0; needs the
    extra `echo2[lora]`."""

    rank: NonNegative = 0
    """Rows of A and columns of B of each adapted matrix; 0 trains all weights instead."""
    alpha: PositiveFloat = 32.0
    """An adapter's product counts alpha / rank times."""
    targets: tuple[str, ...] = ("all-linear",)
    """Names of the linear layers with an adapter, such as ["q_proj", "v_proj"]; `all-linear` is every one of them but
    the output embedding."""

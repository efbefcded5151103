"""The GPUs that throughput is estimated for, by the names that markets give them.

Invariant: figures are the vendor's peaks, dense (no sparsity), so no real program exceeds them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec

from echo2.errors import UserError
from echo2.provisioning.table import nearest


class Gpu(msgspec.Struct, frozen=True):
    """One GPU's peaks; GB and TB are powers of ten."""

    name: str
    memory_gb: float
    bandwidth_gb_per_s: float
    """Of its memory."""
    bf16_tflops: float
    """Matrix products of bf16 with accumulation in fp32, 10¹² operations per second."""


GPUS: Mapping[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # NVIDIA's data sheets: A100 (June 2021, PCIe for 80 GB), H100 SXM, H200 SXM.
        Gpu("A100-40GB", 40.0, 1555.0, 312.0),
        Gpu("A100-80GB", 80.0, 1935.0, 312.0),
        Gpu("H100", 80.0, 3350.0, 989.0),
        Gpu("H200", 141.0, 4800.0, 989.0),
        # NVIDIA's architecture papers: Blackwell (2025), Ada (2022), Ampere GA102 (2020).
        Gpu("RTX5090", 32.0, 1792.0, 209.5),
        Gpu("RTX4090", 24.0, 1008.0, 165.2),
        Gpu("RTX3090", 24.0, 936.0, 71.0),
    )
}

_SAME: Mapping[str, str] = {
    "H100SXM": "H100",
    "H100SXM5": "H100",
    "H10080GB": "H100",
    "H100MEGA": "H100",
    "H200SXM": "H200",
}
"""Other names of the same GPU; an H100 on a PCIe card is slower and not among them."""
_A100_LARGE_GB = 60.0
"""An A100 with more memory is the one with 80 GB."""


def gpu_named(text: str) -> Gpu:
    """The GPU that ``text`` means: case, spaces and dashes do not matter. Raises UserError for one we do not know."""
    if gpu := GPUS.get(market_name(text)):
        return gpu
    near = nearest(market_name(text), GPUS)
    raise UserError(
        f"throughput can be estimated for {', '.join(GPUS)}, got {text!r}"
        + (f" (did you mean {near}?)" if near else "")
        + ": measure its rollouts_per_s and write it down"
    )


def market_name(text: str, memory_gb: float | None = None) -> str:
    """Our name for the GPU a market calls ``text``; unchanged where we have none.

    SkyPilot's catalog says A100 for 40 GB and A100-80GB for 80 GB, Vast's part of it A100 for both, with the memory
    beside it; that is what ``memory_gb``, of one GPU, decides.
    """
    plain = re.sub(r"[^A-Z0-9]", "", text.upper()).removeprefix("NVIDIA").removeprefix("GEFORCE")
    if plain in ("A100", "A100SXM", "A100SXM4", "A100PCIE"):
        return "A100-80GB" if memory_gb is not None and memory_gb > _A100_LARGE_GB else "A100-40GB"
    plain = _SAME.get(plain, plain)
    return next((name for name in GPUS if name.replace("-", "") in (plain, f"RTX{plain}")), text)

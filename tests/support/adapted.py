"""Versions of a small model with adapters, as its learner makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from echo2.broadcast.lora import rounded
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.planes import write_anchor
from echo2.learner.adapters import AdapterSnapshots
from echo2.types import Policy

SHAPE, RANK = (64, 256), 2
PART = "base_model.model.w.lora_{}.weight"
Stream = tuple[str, tuple[int, ...], Callable[[], memoryview]]


class AdaptedRun:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer = AdapterSnapshots(folder / "base", "run", "bfloat16", alpha=4.0)
        weight = np.random.default_rng(0).standard_normal(SHAPE, np.float32)
        self.writer.keep_base(
            {"w.weight": stream(weight), "norm": stream(weight[0])}, {"head": "w.weight"}, known=False
        )

    async def version(self, version: int) -> tuple[Manifest, Path]:
        """What travels, and where it lies: version 0 whole, a later one as its adapters."""
        random = np.random.default_rng(version)
        parts = {"A": (RANK, SHAPE[1]), "B": (SHAPE[0], RANK)}
        tensors = {
            PART.format(side): stream(random.standard_normal(shape, np.float32)) for side, shape in parts.items()
        }
        policy, folder = Policy(0, version), self.raw(version)
        manifest = self.writer(tensors, {}, run_id="run", policy=policy, dtype="bfloat16", folder=folder)
        sent = await self.writer.delta(manifest, folder)
        if sent is not None:
            return sent
        return write_anchor(folder, folder / "anchor"), folder / "anchor"

    def raw(self, version: int) -> Path:
        return self.folder / f"0.{version}"


def stream(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Stream:
    return "BF16", array.shape, lambda: rounded(np.ascontiguousarray(array).reshape(-1), "BF16").data

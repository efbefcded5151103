"""A run's engine with its model installed, for commands that generate without a run."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from echo2.config.root import Config
    from echo2.data.chat import ChatFormat
    from echo2.rollout.engine import Engine


class Installed(msgspec.Struct, frozen=True):
    engine: Engine
    chat: ChatFormat
    load_s: float
    """Time to read the snapshot aside, while an engine serves."""
    switch_s: float
    """Time in which the engine generates nothing."""


async def installed_engine(config: Config, folder: Path, threads: int) -> Installed:
    """The engine and chat format of the configuration; its model is version 0 of nothing, packed into ``folder``."""
    from echo2.broadcast.pack import pack_directory
    from echo2.data.chat import ByteChat
    from echo2.rollout.engines import WITHOUT_MODEL, build_engine
    from echo2.types import Policy

    policy = Policy(0, 0)
    model_dir: Path | None = None
    chat: ChatFormat = ByteChat()
    dtype: str = config.model.snapshot_dtype
    if config.rollout.engine not in WITHOUT_MODEL:
        from echo2.data.template_chat import TemplateChat
        from echo2.learning.pretrained import resolve_model

        model_dir = await asyncio.to_thread(resolve_model, config.model, folder, seed=config.run.seed)
        chat = await asyncio.to_thread(TemplateChat, model_dir)
        manifest = await asyncio.to_thread(pack_directory, model_dir, folder / "snapshot", policy=policy)
        dtype = manifest.dtype
    engine = build_engine(
        config.rollout.engine, model_dir, device=config.workers.device, threads=threads, dtype=dtype,
        server=config.server, folder=folder / "engine",
    )  # fmt: skip
    began_s = time.monotonic()
    try:
        await engine.prefetch(policy, folder / "snapshot")
        loaded_s = time.monotonic()
        await engine.activate(policy)
    except BaseException:
        await engine.close()
        raise
    return Installed(engine, chat, loaded_s - began_s, time.monotonic() - loaded_s)

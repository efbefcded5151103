"""Models that play but are not trained: an engine as an opponent, and an earlier version of the policy.

Invariant: a reply is a function of the conversation and the seed, so the trajectories of a group that do the same
meet the same answer. An opponent's tokens are nobody's training data; they may be rendered anew each turn.

Name it as ``model`` of an opponent: ``echo2.rollout.frozen:FrozenPolicy``, with a snapshot folder that lies on the
worker's machine (``echo2 export RUN --version v -o DIR``, then ``echo2 snapshot pack DIR -o SNAPSHOT``).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from echo2.data.chat import ChatFormat
from echo2.data.task import Message
from echo2.errors import ConfigError
from echo2.rollout.engine import Engine
from echo2.rollout.engines import build_engine
from echo2.types import Policy, Sampling

MANIFEST_NAME = "manifest.json"


class _Description(msgspec.Struct, frozen=True):
    policy: Policy
    dtype: str


class EngineModel:
    """Any engine with something installed, as a model that answers conversations."""

    def __init__(self, engine: Engine, chat: ChatFormat, sampling: Sampling, *, thinking: bool = False) -> None:
        self._engine, self._chat = engine, chat
        self._sampling = msgspec.structs.replace(sampling, stop_token_ids=chat.stop_token_ids)
        self._thinking = thinking

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Raises EngineError."""
        asked = self._chat.render(messages, thinking=self._thinking)
        digest = hashlib.blake2b(f"{self._sampling.seed}/{asked}".encode(), digest_size=6).digest()
        sampling = msgspec.structs.replace(self._sampling, seed=int.from_bytes(digest, "little"))
        (completion,) = await self._engine.generate(asked, sampling, 1)
        return self._chat.decode(completion.token_ids)


class FrozenPolicy:
    """snapshot: folder of a packed snapshot.  device, threads: as for workers.  Loaded when it is first asked."""

    def __init__(
        self,
        *,
        snapshot: str,
        device: str = "auto",
        threads: int = 0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        max_tokens: int = 256,
        thinking: bool = False,
        seed: int = 0,
    ) -> None:
        self._folder = Path(snapshot).expanduser()
        try:
            self._described = msgspec.json.decode((self._folder / MANIFEST_NAME).read_bytes(), type=_Description)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"frozen policy: snapshot must be a folder that echo2 snapshot pack made, got {snapshot!r}: {error}"
            ) from error
        self._device, self._threads, self._thinking = device, threads, thinking
        self._sampling = Sampling(temperature, top_p, max_tokens, seed)
        self._loading = asyncio.Lock()
        self._model: EngineModel | None = None

    async def __call__(self, messages: Sequence[Message]) -> str:
        """Raises EngineError or UserError."""
        async with self._loading:
            if self._model is None:
                self._model = await self._load()
        return await self._model(messages)

    async def _load(self) -> EngineModel:
        from echo2.data.template_chat import TemplateChat

        described = self._described
        engine = await asyncio.to_thread(
            build_engine,
            "transformers",
            self._folder,
            device=self._device,
            threads=self._threads,
            dtype=described.dtype,
        )
        await engine.prefetch(described.policy, self._folder)
        await engine.activate(described.policy)
        chat = await asyncio.to_thread(TemplateChat, self._folder)
        return EngineModel(engine, chat, self._sampling, thinking=self._thinking)

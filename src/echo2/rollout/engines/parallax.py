"""Parallax's dialect: conversations in, text out.

Its front door has neither token ids nor log-probs, so replies are tokenised anew by the worker and carry none; the
learner then takes w = 1 and counts those tokens (``unweighted_share``). A reply does not say which weights gave it.

Weights: a server that the worker started (``parallax serve``) is started anew with them. A network of Parallax nodes at
``server.url`` takes them from its own peer-to-peer store: the worker puts every tensor there as a block, asks for a
refit, and waits until the scheduler's timestamp says that the nodes have it.

Invariant (I5): the refit counts when the timestamp has reached the one of the request, by the deadline. That is the
oldest time among the nodes that report a refit: a node that never takes one is not seen by Parallax, nor by us.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from echo2.errors import EngineError, UserError
from echo2.rollout.engines.servers.chat import ask_chat
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.dialect import LOOK_S, Facts, named, routes, served
from echo2.rollout.engines.servers.rows import Answer, Question
from echo2.transport.json_line import JsonLine, WrongAnswer, decoded

WHO = "parallax server"
CHAT, REFIT, REFITTED = "/v1/chat/completions", "/weight/refit", "/weight/refit/timestamp"
POLL_S = 1.0
"""Nodes report to the scheduler every few seconds."""


class Blocks(Protocol):
    """The peer-to-peer store that Parallax nodes take weights from."""

    def put(self, block: bytes) -> str:
        """The block's name there. It is served until ``close``."""
        ...

    def forget(self, name: str) -> None: ...

    def close(self) -> None: ...


class LatticaBlocks:
    """peers: addresses of the Parallax network, as its scheduler prints them. Raises UserError without ``lattica``."""

    def __init__(self, peers: Sequence[str]) -> None:
        try:
            from lattica import Lattica
        except ModuleNotFoundError as error:
            raise UserError(
                "weights reach Parallax nodes through lattica, which is not installed; run: pip install lattica"
            ) from error
        self._peer = Lattica.builder().with_bootstraps(list(peers)).build()

    def put(self, block: bytes) -> str:
        return str(self._peer.put_block(block))

    def forget(self, name: str) -> None:
        self._peer.remove_block(name)

    def close(self) -> None:
        self._peer.close()


class _Timestamp(msgspec.Struct):
    latest_timestamp: float


class Parallax:
    name = "parallax"
    health_path = "/v1/models"
    logprobs = False
    top_p_logprobs = False

    def __init__(self, blocks: Blocks | None = None, now: Callable[[], float] = time.time) -> None:
        """blocks: None where no weights can be given to a running network.  now: seconds since 1970."""
        self._blocks = blocks
        self._now = now
        self._put: list[str] = []

    def command(self) -> tuple[str, ...]:
        return ("parallax", "serve")

    def arguments(self, model: Path, name: str, port: int, dtype: str) -> Sequence[str]:
        return ("--model-path", str(model), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype)

    def environment(self, key: str) -> Mapping[str, str]:
        return {"HF_HUB_OFFLINE": "1"}  # it knows no keys: it listens on loopback without

    async def look(self, line: JsonLine, name: str) -> Facts:
        try:
            offered = await routes(line, WHO)
        except WrongAnswer:  # a node's own front end has no description of itself
            offered = frozenset()
        models = await served(line, WHO)
        # A server that we started serves one model, under a name of its own choice.
        model, context = named(models, name if name in models or len(models) != 1 else "", WHO)
        refits = {f"POST {REFIT}", f"GET {REFITTED}"} <= offered
        notes = ["replies are text: they are tokenised anew, without log-probs"]
        if refits and self._blocks is None:
            notes.append("it takes weights while it runs if server.peers names its network")
        return Facts(
            model=model,
            context=context,
            takes_weights=refits and self._blocks is not None,
            takes_adapters=False,
            halts=False,
            label_route=False,
            notes=tuple(notes),
        )

    async def ask(self, line: JsonLine, question: Question, deadline_s: float) -> Answer:
        said = await ask_chat(
            line,
            CHAT,
            question.model,
            question.messages,
            question.sampling,
            question.sampling.seed,
            thinking=question.thinking,
            deadline_s=deadline_s,
            again=True,  # 429 and 503 mean that all pipelines are busy
        )
        return Answer((), None, said.finish, model=said.model, text=said.text)

    async def label(self, line: JsonLine) -> str:
        raise EngineError("Parallax does not name its weights")

    async def update(self, line: JsonLine, checkpoint: Checkpoint, label: str, deadline_s: float) -> None:
        blocks = self._blocks
        if blocks is None:
            raise EngineError("Parallax takes weights while it runs only if server.peers names its network")
        old, self._put = self._put, []
        names = await asyncio.to_thread(self._publish, blocks, checkpoint)
        stamp = max(self._now(), await self._stamp(line) + 1.0)
        order = {"time_stamp": stamp, "version": checkpoint.policy.version, "index_map": names}
        await line.ask("POST", REFIT, order, deadline_s=LOOK_S)
        try:
            async with asyncio.timeout(deadline_s):
                await self._taken(line, stamp)
        except TimeoutError:
            raise EngineError(
                f"the nodes must have taken policy {checkpoint.policy} within {deadline_s:g} s, "
                "they report an older one"
            ) from None
        for name in set(old) - set(self._put):
            await asyncio.to_thread(blocks.forget, name)

    def _publish(self, blocks: Blocks, checkpoint: Checkpoint) -> dict[str, str]:
        """Tensor → name of its block."""
        names = {tensor: blocks.put(block) for tensor, block in tensor_blocks(checkpoint.weights)}
        self._put = list(names.values())
        return names

    async def _taken(self, line: JsonLine, stamp: float) -> None:
        """Until the nodes report this refit, or a newer one."""
        while True:
            if await self._stamp(line) >= stamp:
                return
            await asyncio.sleep(POLL_S)

    async def _stamp(self, line: JsonLine) -> float:
        body = await line.ask("GET", REFITTED, deadline_s=LOOK_S)
        return decoded(WHO, body, _Timestamp, "the time of the last refit").latest_timestamp

    async def adapt(self, line: JsonLine, checkpoint: Checkpoint, name: str, deadline_s: float) -> None:
        raise EngineError("Parallax takes no adapters by name")

    async def forget(self, line: JsonLine, name: str) -> None:
        raise EngineError("Parallax takes no adapters by name")

    def close(self) -> None:
        if self._blocks is not None:
            self._blocks.close()

    async def halt(self, line: JsonLine) -> None:
        raise EngineError("Parallax does not give back running replies")


def tensor_blocks(weights: Path) -> Iterator[tuple[str, bytes]]:
    """Every tensor of a safetensors file as a safetensors file of its own, by name."""
    with weights.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, last = entry["data_offsets"]
            words = json.dumps({name: {**entry, "data_offsets": [0, last - first]}}, separators=(",", ":")).encode()
            words += b" " * (-len(words) % 8)
            opened.seek(8 + length + first)
            yield name, len(words).to_bytes(8, "little") + words + opened.read(last - first)

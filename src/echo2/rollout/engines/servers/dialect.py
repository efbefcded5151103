"""What the engine asks of each kind of server, and what it learns about one.

Invariant: what a server can do is read off the server when it has started, never assumed from its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from echo2.errors import EngineError
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.rows import Answer, Question
from echo2.transport.json_line import JsonLine, decoded

LOOK_S = 30.0
"""A question that costs the server nothing."""


class Facts(msgspec.Struct, frozen=True):
    """What one running server can do."""

    model: str
    """Name under which it serves the weights it has."""
    context: int | None
    takes_weights: bool
    """Full weights from a folder while it runs."""
    takes_adapters: bool
    halts: bool
    """It gives back what it has of running replies when it is told to, so ``continue`` is exact."""
    label_route: bool
    """It says which weights it has, beside its replies."""
    notes: tuple[str, ...] = ()
    """For people: what was found, and what is missing."""


class Dialect(Protocol):
    name: str
    health_path: str
    logprobs: bool
    top_p_logprobs: bool
    """Log-probs are over the whole vocabulary with top-p below 1, too."""

    def command(self) -> tuple[str, ...]:
        """What starts the server where the user named nothing."""
        ...

    def arguments(self, model: Path, name: str, port: int, dtype: str) -> Sequence[str]: ...

    def environment(self, key: str) -> Mapping[str, str]:
        """key: that the server should ask for."""
        ...

    async def look(self, line: JsonLine, name: str) -> Facts:
        """name: of the model that is wanted; empty for the only one. Raises EngineError, UserError."""
        ...

    async def ask(self, line: JsonLine, question: Question, deadline_s: float) -> Answer: ...

    async def label(self, line: JsonLine) -> str:
        """Of the weights it has now."""
        ...

    async def update(self, line: JsonLine, checkpoint: Checkpoint, label: str, deadline_s: float) -> None:
        """Take full weights from the folder. Nothing else is running. The server serves again when this returns."""
        ...

    async def adapt(self, line: JsonLine, checkpoint: Checkpoint, name: str, deadline_s: float) -> None:
        """Load a LoRA adapter under a name that requests can ask for."""
        ...

    async def forget(self, line: JsonLine, name: str) -> None:
        """Unload an adapter."""
        ...

    async def halt(self, line: JsonLine) -> None:
        """Return what there is of every running reply, now."""
        ...

    def close(self) -> None: ...


class _Schema(msgspec.Struct):
    paths: dict[str, dict[str, object]] = {}


class _Model(msgspec.Struct):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def routes(line: JsonLine, who: str) -> frozenset[str]:
    """``VERB /path`` of everything the server offers."""
    schema = decoded(who, await line.ask("GET", "/openapi.json", deadline_s=LOOK_S), _Schema, "an OpenAPI schema")
    return frozenset(f"{verb.upper()} {path}" for path, verbs in schema.paths.items() for verb in verbs)


async def served(line: JsonLine, who: str) -> dict[str, int | None]:
    """Context length by the name of each served model."""
    models = decoded(who, await line.ask("GET", "/v1/models", deadline_s=LOOK_S), _Models, "a list of models")
    return {model.id: model.max_model_len for model in models.data}


def named(models: Mapping[str, int | None], name: str, who: str) -> tuple[str, int | None]:
    """(name, context) of the wanted model; empty for the only one. Raises EngineError."""
    if name in models:
        return name, models[name]
    if not name and len(models) == 1:
        return next(iter(models.items()))
    wanted = name or "one model, or server.model must name one of them"
    raise EngineError(f"the {who} must serve {wanted}; it serves {', '.join(models) or 'none'}")

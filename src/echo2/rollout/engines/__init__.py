"""The engines a worker can run, by name.

Invariant: importing this loads no engine; torch comes with the transformers engine only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from echo2.config.sections import ServerSection
from echo2.errors import ConfigError, UserError
from echo2.pace import Pace, working_sleep
from echo2.ports import EventLog
from echo2.rollout.engine import Engine

if TYPE_CHECKING:
    from echo2.rollout.engines.servers.dialect import Dialect

SERVERS = ("vllm", "sglang", "parallax")
"""Engines that are a server of their own, with an installed policy."""
WITHOUT_MODEL = ("scripted", "openai")
"""Engines that load no model files."""
KINDS = ("transformers", *SERVERS, "scripted")
"""Engines of workers."""


def check_kind(kind: str) -> None:
    """Raises ConfigError for a name that is no engine's, or of one that nobody can give weights."""
    if kind not in KINDS:
        raise ConfigError(f"a worker's engine must be one of {', '.join(KINDS)}, got {kind!r}")


def build_engine(
    kind: str,
    model_dir: Path | None,
    *,
    device: str,
    threads: int,
    dtype: str,
    pace: Pace = Pace(),  # noqa: B008
    server: ServerSection = ServerSection(),  # noqa: B008 - immutable
    folder: Path = Path("engine"),
    events: EventLog | None = None,
) -> Engine:
    """The engine named ``kind``, with nothing installed yet.

    model_dir: configuration of the model (its weights come as snapshots); the scripted engine needs none.
    threads: CPU threads, 0 for as many as this process may use.
    dtype: element type of the run's snapshots, ``bfloat16`` ….
    pace: time that the scripted engine takes for a group.
    server, folder, events: of an engine that is a server; folder for its checkpoints and log.
    """
    if kind == "scripted":
        from echo2.rollout.engines.scripted import ScriptedEngine

        return ScriptedEngine(duration=lambda prompt_tokens, n, random: pace.draw_s(random), sleep=working_sleep)
    if kind == "openai":
        from echo2.rollout.engines.openai import OpenAIEngine

        return OpenAIEngine(server, _key(server))
    check_kind(kind)
    if model_dir is None:
        raise UserError(f"the {kind} engine must have a model directory with config.json, got none")
    if kind in SERVERS:
        return _server_engine(kind, model_dir, folder, dtype, server, threads, events)
    try:
        from echo2.rollout.engines.transformers import TransformersEngine
    except ModuleNotFoundError as error:
        raise UserError(
            f"the transformers engine must have torch and transformers, and {error.name} is not installed;"
            " run: pip install 'echo2[torch]'"
        ) from error
    return TransformersEngine(model_dir, device=device, threads=threads, dtype=dtype)


def _server_engine(
    kind: str,
    model_dir: Path,
    folder: Path,
    dtype: str,
    server: ServerSection,
    threads: int,
    events: EventLog | None,
) -> Engine:
    from echo2.rollout.engines.servers.engine import ServerEngine
    from echo2.rollout.engines.servers.host import ExternalHost, Host, ManagedHost
    from echo2.rollout.engines.servers.speaking import SpeakingServerEngine
    from echo2.shell import ConsoleEvents

    dialect = _dialect(kind, server)
    host: Host
    if server.url:
        host = ExternalHost(dialect, server, _key(server))
    else:
        host = ManagedHost(dialect, server, folder, dtype, threads)
    made = SpeakingServerEngine if kind == "parallax" else ServerEngine
    return made(dialect, host, model_dir, folder, dtype, server, events or ConsoleEvents(kind))


def _dialect(kind: str, server: ServerSection) -> Dialect:
    if kind == "vllm":
        from echo2.rollout.engines.vllm import Vllm

        return Vllm()
    if kind == "sglang":
        from echo2.rollout.engines.sglang import Sglang

        return Sglang()
    from echo2.rollout.engines.parallax import LatticaBlocks, Parallax

    return Parallax(LatticaBlocks(server.peers) if server.peers else None)


def _key(server: ServerSection) -> str:
    """The API key of the server's address. Raises UserError when its variable is not set."""
    if not server.key_variable:
        return ""
    key = os.environ.get(server.key_variable)
    if not key:
        raise UserError(
            f"server.key_variable must name a variable that holds the key, {server.key_variable} is not set"
        )
    return key

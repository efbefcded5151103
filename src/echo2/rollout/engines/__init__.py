"""The engines a worker can run, by name.

Invariant: importing this loads no engine; torch comes with the transformers engine only.
"""

from __future__ import annotations

from pathlib import Path

from echo2.errors import ConfigError, UserError
from echo2.pace import Pace, working_sleep
from echo2.rollout.engine import Engine

KINDS = ("transformers", "scripted")


def check_kind(kind: str) -> None:
    """Raises ConfigError for a name that is no engine's."""
    if kind not in KINDS:
        raise ConfigError(f"an engine must be {' or '.join(KINDS)}, got {kind!r}")


def build_engine(
    kind: str,
    model_dir: Path | None,
    *,
    device: str,
    threads: int,
    dtype: str,
    pace: Pace = Pace(),  # noqa: B008
) -> Engine:
    """The engine named ``kind``, with nothing installed yet.

    model_dir: configuration of the model (its weights come as snapshots); the scripted engine needs none.
    threads: CPU threads, 0 for the library's choice. dtype: element type of the run's snapshots, ``bfloat16`` ….
    pace: time that the scripted engine takes for a group.
    """
    check_kind(kind)
    if kind == "scripted":
        from echo2.rollout.engines.scripted import ScriptedEngine

        return ScriptedEngine(duration=lambda prompt_tokens, n, random: pace.draw_s(random), sleep=working_sleep)
    if model_dir is None:
        raise UserError("the transformers engine must have a model directory with config.json, got none")
    try:
        from echo2.rollout.engines.transformers import TransformersEngine
    except ModuleNotFoundError as error:
        raise UserError(
            f"the transformers engine must have torch and transformers, and {error.name} is not installed;"
            " run: pip install 'echo2[torch]'"
        ) from error
    return TransformersEngine(model_dir, device=device, threads=threads, dtype=dtype)

"""What the experiments with real training share: runs that go on where they ended, and results written as they come.

Invariant: nothing is done twice. A run that has ended is a model directory, and one that was cut short is resumed; what
was measured stands in the results file before the next measurement begins. The commands are those of any user.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs"
"""Where runs and models are kept by default; no part of the repository."""


def echo2(*words: str | Path) -> dict[str, Any]:
    """What ``echo2 … --json`` prints last. Raises CalledProcessError for a command that fails."""
    command = [sys.executable, "-m", "echo2", *map(str, words), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    facts: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return facts


def trained(config: Path, folder: Path, settings: Mapping[str, Any]) -> Path:
    """Folder of a run that has ended, called as ``settings`` say; it is begun or resumed where it has not.

    Raises CalledProcessError for a run that fails.
    """
    run = folder / str(settings["run.name"])
    if not ended(run).exists():
        if run.exists():
            echo2("train", run, "--resume")
        else:
            echo2("train", config, *overrides({**settings, "run.dir": str(folder)}))
        ended(run).touch()
    return run


def ended(run: Path) -> Path:
    """The mark of a run that has ended; outside its folder, which belongs to the run."""
    return run.with_name(f"{run.name}.ended")


def exported(run: Path, version: int | None = None) -> Path:
    """Model directory of a version of a run, the last by default."""
    out = run.with_name(f"{run.name}.{'model' if version is None else f'version-{version}'}")
    if not out.exists():
        echo2("export", run, *(() if version is None else ("--version", str(version))), "-o", out)
    return out


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Arguments that set some keys: ``--set learning.lr=0.001``."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={toml(value)}")]


def toml(value: Any) -> str:
    """A value as TOML writes it in a line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {toml(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def rewards(run: Path) -> list[float]:
    """Mean reward of each training batch of a run."""
    from echo2.report.folder import read_run

    return [line.reward_trained_mean for line in read_run(run).metrics]

"""Where the files of a run are.

Invariant: a folder that ``prepare`` returned from holds the resolved configuration that the run goes by; a run is never
continued with other prompts, rows or weights than it began with.

    config.toml metrics.jsonl events.jsonl transcripts.jsonl evals.jsonl report.html coordinator.json buffer.sqlite
    checkpoints/ snapshots/ assets/ model/ learner/ keys/ join/{worker,learner,operator} workers/NAME/ logs/PROGRAM.log
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from echo2.config.load import load_config
from echo2.config.render import render_config
from echo2.config.root import Config
from echo2.durable import write_file
from echo2.errors import UserError

FIXED_KEYS = (
    "run.name", "run.seed", "run.mode", "model.path", "model.snapshot_dtype", "model.warm_start_steps",
    "model.warm_start_lr", "tasks", "rollout.group_size", "rollout.rollouts_per_step", "rollout.engine",
    "learning.learner", "rehearsal.snapshot_bytes", "rehearsal.changed",
)  # fmt: skip
"""A resumed run keeps these: the rows in its buffer, its prompts and its weights depend on them."""


class RunFolder(msgspec.Struct, frozen=True):
    root: Path

    @classmethod
    def of(cls, config: Config) -> RunFolder:
        return cls((Path(config.run.dir) / config.run.name).absolute())

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def report(self) -> Path:
        return self.root / "report.html"

    @property
    def coordinator(self) -> Path:
        """{host, port, pid} of the running coordinator."""
        return self.root / "coordinator.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def learner(self) -> Path:
        return self.root / "learner"

    def join(self, role: str) -> Path:
        """File with the join string of ``worker``, ``learner`` or ``operator``."""
        return self.root / "join" / role

    def worker(self, name: str) -> Path:
        return self.root / "workers" / name

    def log(self, program: str) -> Path:
        return self.root / "logs" / f"{program}.log"

    @property
    def is_used(self) -> bool:
        return self.config.exists()

    def load(self) -> Config:
        """The configuration the run goes by. Raises UserError when this is no run folder."""
        if not self.is_used:
            raise UserError(f"{self.root} must be a run folder with a config.toml; give the folder of a run")
        return load_config(self.config, check_places=False)

    def prepare(self, config: Config, *, resume: bool) -> None:
        """Make the folder ready for ``config``. Raises UserError rather than mix two runs."""
        if self.is_used:
            if not resume:
                raise UserError(
                    f"the run folder {self.root} exists already; continue it with --resume, or choose another run.name"
                )
            check_resumable(self.load(), config)
        elif resume and not self.root.exists():
            raise UserError(f"--resume needs a run folder, and {self.root} does not exist; start without --resume")
        elif self.root.exists() and any(self.root.iterdir()):
            raise UserError(f"{self.root} must be empty or a run folder, it holds other files; choose another run.name")
        try:
            for folder in (self.root, self.root / "logs", self.root / "join", self.root / "workers"):
                folder.mkdir(parents=True, exist_ok=True)
            write_file(self.config, render_config(config).encode())
        except OSError as error:
            raise UserError(f"the run folder {self.root} must be writable, but: {error.strerror}") from error


def check_resumable(old: Config, new: Config) -> None:
    """Raises UserError, naming every key that must stay as it was."""
    changed = [
        f"{key} was {_value(old, key)!r} and would be {_value(new, key)!r}"
        for key in FIXED_KEYS
        if _value(old, key) != _value(new, key)
    ]
    if changed:
        raise UserError(f"a resumed run must keep what it began with: {'; '.join(changed)}; start a new run for that")


def _value(config: Config, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value

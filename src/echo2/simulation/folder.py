"""A simulated run as a run folder, so that whatever reads a real run reads it too.

Invariant: the files are those of a real coordinator; wall time is virtual time from the start of the epoch.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from echo2.config.render import render_config
from echo2.durable import room_for, write_file
from echo2.errors import UserError
from echo2.simulation.programs import COORDINATOR
from echo2.simulation.scenario import Scenario
from echo2.simulation.world import SimulatedRun


def write_folder(scenario: Scenario, run: SimulatedRun, folder: Path) -> None:
    """Raises UserError when it cannot be written, DiskFull."""
    encode = msgspec.json.encode
    events = (_event(event) for event in run.events if event["who"] == COORDINATOR)
    try:
        with room_for(folder):
            folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / "config.toml", render_config(scenario.config).encode())
        write_file(folder / "metrics.jsonl", b"".join(encode(line) + b"\n" for line in run.metrics))
        write_file(folder / "events.jsonl", b"".join(encode(event) + b"\n" for event in events))
    except OSError as error:
        raise UserError(f"{folder} must be writable, but: {error.strerror}") from error


def _event(event: dict[str, object]) -> dict[str, object]:
    fields = {name: value for name, value in event.items() if name not in ("at_s", "who")}
    return {"wall_time": event["at_s"], **fields}

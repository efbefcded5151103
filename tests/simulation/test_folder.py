"""A simulated run as a run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scenarios import DISTURBED, scenario

from echo2.config.load import load_config
from echo2.errors import UserError
from echo2.report.folder import read_run
from echo2.report.html import write_report
from echo2.simulation.folder import write_folder
from echo2.simulation.play import Played, play


@pytest.fixture(scope="module")
def played() -> Played:
    return play(scenario(base=DISTURBED))


def test_what_reads_a_real_run_reads_it(played: Played, tmp_path: Path) -> None:
    write_folder(scenario(base=DISTURBED), played.run, tmp_path / "run")
    found = read_run(tmp_path / "run")
    assert [line.step for line in found.metrics] == list(range(20))
    assert found.metrics == tuple(played.run.metrics)
    assert found.unreadable_lines == 0
    assert {"published", "disseminated", "worker_joined", "provisioning_activate"} <= {e["kind"] for e in found.events}
    assert load_config(tmp_path / "run" / "config.toml", check_places=False) == scenario(base=DISTURBED).config
    write_report(tmp_path / "run")
    assert "</html>" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_its_clock_is_the_virtual_one(played: Played, tmp_path: Path) -> None:
    write_folder(scenario(base=DISTURBED), played.run, tmp_path)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert all(0 <= event["wall_time"] <= played.run.ended_s for event in events)
    assert [event["wall_time"] for event in events] == sorted(event["wall_time"] for event in events)


def test_a_place_that_cannot_be_written_is_the_users_mistake(played: Played, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="must be writable"):
        write_folder(scenario(base=DISTURBED), played.run, tmp_path / "file" / "run")

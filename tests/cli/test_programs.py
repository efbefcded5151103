from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import Echo2

ROOT = Path(__file__).parents[2]
STARTS_WITHIN_S = 40.0


@pytest.fixture
def run_toml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "run.toml"
    path.write_text('[rollout]\nengine = "scripted"\n')
    return path


@pytest.fixture
def running(run_toml: Path) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """A coordinator on loopback, as a process, and its run folder."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    folder = run_toml.parent / "runs" / "run"
    with subprocess.Popen([sys.executable, "-m", "echo2", "coordinator", str(run_toml)], env=environment) as process:
        try:
            deadline = time.monotonic() + STARTS_WITHIN_S
            while not (folder / "coordinator.json").exists():
                assert process.poll() is None, "the coordinator ended"
                assert time.monotonic() < deadline, "the coordinator did not start"
                time.sleep(0.05)
            yield folder, process
        finally:
            process.kill()


@pytest.mark.parametrize("command", ["train", "coordinator"])
def test_a_port_in_use_is_one_sentence_and_no_run_folder_is_left(echo2: Echo2, run_toml: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = echo2(command, run_toml, "--set", f"coordinator.port={taken.getsockname()[1]}")

    assert done.code == 2
    assert len(done.faults) == 1
    assert "must be free to listen on" in done.faults[0]
    assert not (run_toml.parent / "runs").exists()


@pytest.mark.parametrize("command", ["coordinator", "learner"])
def test_what_is_no_run_is_refused(echo2: Echo2, run_toml: Path, command: str) -> None:
    assert echo2(command, "absent.toml").code == 2
    assert "must be a run folder" in echo2(command, run_toml.parent).faults[0]
    assert echo2(command, run_toml, "--set", "staleness.budget=2").code == 2
    assert not (run_toml.parent / "runs").exists()


def test_a_worker_needs_a_sensible_name(echo2: Echo2) -> None:
    assert echo2("worker", "echo2://t@h:1", "--name", "../up").code == 2


@pytest.mark.integration
def test_a_running_coordinator_is_looked_at_and_stopped_with_the_right_string_only(
    echo2: Echo2, running: tuple[Path, subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    folder, process = running
    observer, wrong = folder / "join" / "observer", tmp_path / "wrong"
    wrong.write_text(re.sub("//[^@]*@", "//sesame@", (folder / "join" / "worker").read_text()))

    refused = echo2("worker", wrong, "--name", "w", "--dir", tmp_path / "w")
    assert refused.code == 2
    assert "the join token is unknown" in refused.faults[0]

    picture = echo2("status", observer, "--json")
    assert picture.code == 0, picture.err
    assert (picture.json["name"], picture.json["step"]) == ("run", 0)
    assert "run: " in echo2("status", folder).out

    assert echo2("stop", observer).code == 2
    assert echo2("stop", folder, "--json").json["stopping"] is True
    assert process.wait(timeout=40) == 0
    assert json.loads(echo2("status", folder, "--json").out)["phase"] == "not running"

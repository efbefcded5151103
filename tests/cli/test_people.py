from __future__ import annotations

import socket
from pathlib import Path

import pytest

from .conftest import Echo2


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "r"
    folder.mkdir()
    (folder / "config.toml").write_text('[run]\nname = "r"\nsteps = 9\n[rollout]\nengine = "scripted"\n')
    return folder


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@pytest.mark.parametrize("command", ["status", "stop", "worker"])
def test_a_join_string_is_needed(echo2: Echo2, command: str) -> None:
    done = echo2(command)

    assert done.code == 2
    assert "a join string is needed" in done.faults[0]


@pytest.mark.parametrize("command", ["status", "stop", "worker"])
def test_a_malformed_join_string_is_refused_without_being_repeated(echo2: Echo2, command: str) -> None:
    done = echo2(command, "echo2://sesame@nowhere")

    assert done.code == 2
    assert len(done.faults) == 1
    assert "sesame" not in done.err


def test_a_coordinator_that_does_not_answer_is_no_mistake_of_the_user(
    echo2: Echo2, closed_port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("ECHO2_JOIN", f"echo2://sesame@127.0.0.1:{closed_port}?tls=0")

    done = echo2("status", "--json")

    assert (done.code, done.out) == (1, "")
    assert str(closed_port) in done.faults[0]
    assert "sesame" not in done.err


def test_the_status_of_a_run_that_is_over_comes_from_its_folder(echo2: Echo2, run_folder: Path) -> None:
    done = echo2("status", run_folder, "--json")

    assert done.code == 0, done.err
    assert (done.json["name"], done.json["phase"], done.json["steps"]) == ("r", "not running", 9)
    assert "r: not running, step 0 of 9" in echo2("status", run_folder).out


def test_a_run_that_is_not_running_cannot_be_stopped(echo2: Echo2, run_folder: Path) -> None:
    assert echo2("stop", run_folder).code == 1


def test_a_folder_that_is_no_run_is_refused(echo2: Echo2, tmp_path: Path) -> None:
    done = echo2("status", tmp_path)

    assert done.code == 2
    assert "must be a run folder" in done.faults[0]


def test_watching_and_json_exclude_each_other(echo2: Echo2, run_folder: Path) -> None:
    assert echo2("status", run_folder, "--watch", "--json").code == 2

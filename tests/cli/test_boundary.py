from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from echo2.cli.boundary import logging_to, run
from echo2.errors import ConfigError, IntegrityError, SetAside, TransportError, Unauthorised, UserError

ROOT = Path(__file__).parents[2]


def app_that(command: Callable[[], None]) -> typer.Typer:
    app = typer.Typer()
    app.callback()(lambda: None)
    app.command("go")(command)
    return app


def raising(error: BaseException) -> typer.Typer:
    def go() -> None:
        raise error

    return app_that(go)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ECHO2_DEBUG", raising=False)
    monkeypatch.delenv("ECHO2_LIFELINE", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.mark.parametrize("error", [UserError("no such thing"), Unauthorised("no such thing")])
def test_a_mistake_of_the_user_is_one_line_and_exit_code_2(
    error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(raising(error), ["go"]) == 2
    assert capsys.readouterr() == ("", "echo2: no such thing\n")


def test_each_fault_of_a_configuration_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(ConfigError(["first", "second\nwith a break"])), ["go"]) == 2
    assert capsys.readouterr().err == "echo2: first\necho2: second with a break\n"


@pytest.mark.parametrize(
    "error", [TransportError("nobody answers"), IntegrityError("wrong bytes"), SetAside("it lied")]
)
def test_an_error_raised_on_purpose_is_its_sentence_and_exit_code_1(
    error: Exception, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(raising(error), ["go"]) == 1
    assert capsys.readouterr().err == f"echo2: {error}\n"
    assert not list(tmp_path.glob("echo2-error-*.log"))


def test_anything_else_is_one_line_with_the_place_of_the_full_story_and_exit_code_1(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    error = ValueError("odd")
    assert run(raising(error), ["go"]) == 1

    err = capsys.readouterr().err
    (log,) = tmp_path.glob("echo2-error-*.log")
    assert err.count("\n") == 1
    assert str(error) in err
    assert str(log) in err
    assert "Traceback" in log.read_text()


def test_the_full_story_lies_with_the_run_where_there_is_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()

    def go() -> None:
        with logging_to(logs):
            raise ValueError("odd")

    assert run(app_that(go), ["go"]) == 1
    assert str(logs) in capsys.readouterr().err
    assert len(list(logs.iterdir())) == 1


def test_the_error_inside_a_task_group_is_the_one_that_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> None:
        raise UserError("port 80 must be free")

    async def group() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fail())

    assert run(app_that(lambda: asyncio.run(group())), ["go"]) == 2
    assert capsys.readouterr().err == "echo2: port 80 must be free\n"


def test_a_traceback_is_shown_to_whom_asks_for_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO2_DEBUG", "1")

    assert run(raising(UserError("no such thing")), ["go"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_supervised_program_tells_the_story_in_its_own_log(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ECHO2_LIFELINE", "1")

    assert run(raising(ValueError("odd")), ["go"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "echo2: ValueError: odd"


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(raising(KeyboardInterrupt()), ["go"]) == 1
    assert capsys.readouterr().err == "echo2: interrupted\n"


def test_exit_codes_reach_the_shell_and_help_loads_no_torch() -> None:
    script = (
        "import sys, echo2.cli\n"
        "sys.argv = ['echo2', *sys.argv[1:]]\n"
        "try:\n    echo2.cli.main()\n"
        "finally:\n    print('heavy:', sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}

    def shell(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments], env=environment, capture_output=True, text=True, timeout=50
        )

    helped, wrong = shell("--help"), shell("train", "absent.toml")

    assert (helped.returncode, wrong.returncode) == (0, 2)
    assert helped.stdout.endswith("heavy: []\n")
    assert wrong.stderr == "echo2: the configuration absent.toml must exist, but there is no such file\n"

"""The container file fits the package that it installs. It is read, not built: see containers/README.md."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest
from typer.testing import CliRunner

from echo2.cli.app import app
from echo2.transport.join import ENVIRONMENT_KEY

ROOT = Path(__file__).parents[1]
FILE = ROOT / "containers" / "worker.Dockerfile"
PAGE = (ROOT / "containers" / "README.md").read_text(encoding="utf-8")


def instructions() -> Iterator[tuple[str, str]]:
    """Each instruction with its arguments; comments left out, continued lines joined."""
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        if line.strip():
            name, _, arguments = line.strip().partition(" ")
            yield name, " ".join(arguments.split())


INSTRUCTIONS = list(instructions())


def arguments_of(name: str) -> list[str]:
    return [arguments for found, arguments in INSTRUCTIONS if found == name]


def last_stage() -> list[tuple[str, str]]:
    start = max(k for k, (name, _) in enumerate(INSTRUCTIONS) if name == "FROM")
    return INSTRUCTIONS[start:]


def test_only_known_instructions_are_there_and_the_file_begins_with_a_base() -> None:
    known = {"ARG", "FROM", "WORKDIR", "RUN", "COPY", "ENV", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT"}
    assert {name for name, _ in INSTRUCTIONS} <= known
    assert next(name for name, _ in INSTRUCTIONS if name != "ARG") == "FROM"


def test_everything_that_is_copied_exists_and_passes_the_ignore_file() -> None:
    ignored = FILE.with_name(FILE.name + ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored, "all is left out but what is named"
    passed = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert all((ROOT / name).exists() for name in passed)
    sources = [
        source
        for arguments in arguments_of("COPY")
        if not arguments.startswith("--from=")
        for source in arguments.split()[:-1]
    ]
    assert sorted(sources) == sorted(passed)
    assert all((ROOT / source).exists() for source in sources)


def test_what_is_copied_from_a_stage_is_from_one_that_there_is() -> None:
    stages = {arguments.split()[-1] for arguments in arguments_of("FROM") if " AS " in arguments}
    taken = set(re.findall(r"--from=(\S+)", " ".join(arguments_of("COPY"))))
    assert taken <= stages


def test_the_extras_are_those_of_the_package_and_metadata_needs_no_other_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (default,) = [arguments.partition("=")[2] for arguments in arguments_of("ARG") if arguments.startswith("EXTRAS=")]
    told = re.findall(r"`((?:\w+,)+\w+)`", PAGE)
    assert default
    assert told
    for extras in (default, *told):
        assert set(extras.split(",")) <= set(project["optional-dependencies"])
    copied = " ".join(arguments_of("COPY")).split()
    assert {project["readme"], *project["license-files"]} <= set(copied)


def test_every_variable_is_an_argument_that_its_stage_declares() -> None:
    declared: set[str] = set()
    globals_ = {arguments.partition("=")[0] for name, arguments in INSTRUCTIONS[:2] if name == "ARG"}
    for name, arguments in INSTRUCTIONS:
        used = set(re.findall(r"\$\{?(\w+)", arguments)) - {"PATH"}
        if name == "FROM":
            assert used <= globals_
            declared = set()
        elif name == "ARG":
            declared.add(arguments.partition("=")[0])
        else:
            assert used <= declared, arguments
    assert all(f"`{arguments.partition('=')[0]}`" in PAGE for arguments in arguments_of("ARG"))


def test_the_constraints_were_made_with_the_base_images_python() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "PYTHON=3.11" in arguments_of("ARG")
    assert project["requires-python"] == ">=3.11"


def test_it_runs_as_a_user_who_owns_the_state_and_nothing_secret_is_in_it() -> None:
    stage = last_stage()
    names = [name for name, _ in stage]
    (user,) = [arguments for name, arguments in stage if name == "USER"]
    assert user not in ("root", "0")
    assert names.index("USER") < names.index("ENTRYPOINT")
    (folder,) = [arguments for name, arguments in stage if name == "WORKDIR"]
    assert ("VOLUME", folder) in stage
    assert any(
        name == "RUN" and f"useradd --uid 10001 --create-home {user}" in run and folder in run for name, run in stage
    )
    text = FILE.read_text(encoding="utf-8")
    assert "echo2://" not in text
    assert ENVIRONMENT_KEY not in " ".join(arguments_of("ENV") + arguments_of("ARG"))


def test_the_entry_point_is_a_command_of_the_package_with_the_options_the_page_shows() -> None:
    (entry,) = arguments_of("ENTRYPOINT")
    program, command = json.loads(entry)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    assert program in scripts
    shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    (run,) = re.findall(r"^docker run .*? echo2-worker (.*)$", PAGE, re.MULTILINE)
    options = re.findall(r"--\w+", run)
    assert options
    for option in (*options, ENVIRONMENT_KEY):
        assert option in shown.output
    assert f"-e {ENVIRONMENT_KEY} " in PAGE


@pytest.mark.parametrize(
    "path", ["runs/demo/join/worker", ".git/config", "tests/test_containers.py", ".venv/bin/python"]
)
def test_what_is_no_source_does_not_reach_the_builder(path: str) -> None:
    lines = FILE.with_name(FILE.name + ".dockerignore").read_text(encoding="utf-8").splitlines()
    passed = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert not any(fnmatch(path, name) or path.startswith(f"{name}/") for name in passed)

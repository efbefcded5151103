"""What the README and the documentation say can be typed, configured, imported and followed is so."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from echo2.cli.app import app
from echo2.config.schema import SECTIONS
from echo2.data.gold_episode import check_episodes
from echo2.data.inspect import check
from echo2.data.task import Task
from echo2.simulation.sections import EventSection, OfferSection, WorkersSection, WorldSection

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("**/*.toml"))


def texts() -> list[tuple[str, str]]:
    """(file, text) of all that people are shown."""
    return [(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")) for path in (*PAGES, *EXAMPLES)]


def blocks(language: str) -> list[tuple[str, str]]:
    return [(name, block) for name, text in texts() for block in re.findall(rf"```{language}\n(.*?)```", text, re.S)]


def commands() -> Iterator[tuple[str, str]]:
    """(file, command line): in code, in running text and in the comments that open an example."""
    for name, text in texts():
        joined = re.sub(r"\\\n", " ", text)
        typed = re.findall(r"^#?\s*(?:\$ |[A-Z_]+=\S+ )?(echo2 .+)$", joined, re.M) if name.endswith("toml") else []
        for block in re.findall(r"```(?:sh|console)\n(.*?)```", joined, re.S):
            typed += re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )?(echo2 .+)$", block, re.M)
        typed += re.findall(r"`(echo2 [^`]+)`", re.sub(r"```.*?```", "", joined, flags=re.S).replace("\n", " "))
        yield from ((name, line) for line in typed)


COMMANDS = sorted(set(commands()))


def test_there_are_commands_to_look_at() -> None:
    assert len(COMMANDS) > 60


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line[:50]}" for page, line in COMMANDS])
def test_every_command_that_is_shown_exists_with_its_options(page: str, line: str) -> None:
    command = typer.main.get_command(app)
    words = shlex.split(line.replace("…", "X").replace("\\|", "|"), comments=True)[1:]
    while words and words[0] in (inner := getattr(command, "commands", {})):
        command = inner[words.pop(0)]
    known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
    inner = getattr(command, "commands", {})
    assert not inner or not words or words[0] in "|-" or words[0].startswith("-"), f"{page}: {line}"
    used = {word.strip("[]").partition("=")[0] for word in words if word.strip("[").startswith("-")}
    assert used - {"-"} <= known, f"{page}: {line}"


KEYS = {name: set(section.model_fields) for name, section in SECTIONS.items()}
OF_SCENARIOS = {
    **KEYS,
    "config": set[str](),
    "world": set(WorldSection.model_fields),
    "workers": set(WorkersSection.model_fields),
    "offers": set(OfferSection.model_fields),
    "events": set(EventSection.model_fields),
}


@pytest.mark.parametrize(("page", "block"), blocks("toml"), ids=lambda text: text[:40])
def test_every_table_that_is_shown_has_keys_that_exist(page: str, block: str) -> None:
    tables = tomllib.loads(block)
    if "project" in tables:
        return  # of the reader's own package
    known = OF_SCENARIOS if page == "docs/simulation.md" else KEYS
    for name, table in tables.items():
        assert name in known, f"{page}: [{name}]"
        for row in table if isinstance(table, list) else [table]:
            assert not isinstance(row, dict) or set(row) <= known[name], f"{page}: [{name}]"


TASKS = [block for page, block in blocks("python") if page == "docs/tasks.md"]


@pytest.mark.parametrize("source", TASKS, ids=lambda source: source.splitlines()[0])
async def test_a_task_that_is_shown_passes_its_own_check(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (name,) = (node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    module = f"shown_{name.lower()}"
    (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    task = getattr(__import__(module), name)()
    assert isinstance(task, Task)
    task.name = name
    assert check(task, 20).passed
    assert (await check_episodes(task))[1] == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_link_leads_somewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        file = path.parent / target if target else path
        assert file.exists(), f"{path.name} names {target}"
        if anchor:
            heads = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, anchor


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_file_of_ours_that_is_named_is_there(path: Path) -> None:
    named = re.findall(
        r"`((?:examples|docs|tests|experiments|bench|src)/[\w/.\-]*\w)`", path.read_text(encoding="utf-8")
    )
    assert [name for name in named if not (ROOT / name).exists()] == []

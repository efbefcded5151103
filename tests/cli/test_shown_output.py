"""What docs/provisioning.md and docs/simulation.md show is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .conftest import Echo2

ROOT = Path(__file__).parents[2]
BLOCKS = [
    block
    for name in ("provisioning", "simulation")
    for block in re.findall(
        r"```console\n\$ echo2 (.+)\n((?:.*\n)*?)```", (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    )
]


def test_the_pages_have_examples() -> None:
    assert len(BLOCKS) >= 7


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[str(k) for k in range(len(BLOCKS))])
def test_an_example_prints_what_the_page_shows(
    echo2: Echo2, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    done = echo2(*shlex.split(command))
    told = "" if command.startswith("simulate") else done.err  # where to find more
    assert (done.out + told).splitlines() == shown.splitlines()

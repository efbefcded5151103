"""What docs/provisioning.md shows is what the commands print."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from .conftest import Echo2

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "provisioning.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n\$ echo2 (.+)\n((?:.*\n)*?)```", PAGE)


def test_the_page_has_examples() -> None:
    assert len(BLOCKS) >= 6


@pytest.mark.parametrize(("command", "shown"), BLOCKS, ids=[str(k) for k in range(len(BLOCKS))])
def test_an_example_prints_what_the_page_shows(
    echo2: Echo2, monkeypatch: pytest.MonkeyPatch, command: str, shown: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(ROOT)
    done = echo2(*shlex.split(command))
    assert [line.rstrip() for line in (done.out + done.err).splitlines()] == shown.splitlines()

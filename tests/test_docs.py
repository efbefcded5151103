"""What the documentation says about tests and invariants is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "field-reports.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_every_test_the_page_names_exists() -> None:
    assert len(NAMED) > 80
    absent = [
        f"{path}::{name}"
        for path, name in NAMED
        if not re.search(rf"^\s*(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert absent == []


@pytest.mark.parametrize("invariant", [f"I{number}" for number in range(1, 11)])
def test_every_invariant_is_named_by_a_test_that_the_page_lists(invariant: str) -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith(f"| {invariant} |"))
    naming = re.compile(rf"\b{invariant}\b|test_{invariant.lower()}_")
    listed = {path for path, name in NAMED if f"{path}::{name}" in row}
    assert any(naming.search((ROOT / path).read_text(encoding="utf-8")) for path in listed)

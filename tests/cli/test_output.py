from __future__ import annotations

import pytest
from rich.table import Table

from echo2.cli.output import show


def test_a_table_keeps_its_figures_on_a_narrow_terminal_and_ends_no_line_in_blanks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    table = Table("name", "figure", "", box=None)
    table.add_row("a" * 30, "0.196", "")
    show(table, least_columns=60)
    out = capsys.readouterr().out
    assert f"{'a' * 30}  0.196\n" in out
    assert all(line == line.rstrip() for line in out.splitlines())

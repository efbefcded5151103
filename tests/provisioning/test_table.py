from __future__ import annotations

import pytest

from echo2.errors import ConfigError
from echo2.provisioning.table import Columns, nearest, parse_table

COLUMNS = Columns(("a", "b"), ("c",))


def test_rows_are_counted_as_a_spreadsheet_does() -> None:
    table = parse_table(b'a,b\n\n"x\ny",1\n,\nz,2\n', "t", COLUMNS)
    assert [(row.number, row.cells) for row in table.rows] == [
        (3, {"a": "x\ny", "b": "1"}),
        (5, {"a": "z", "b": "2"}),
    ]


def test_columns_of_others_pass_where_told() -> None:
    (row,) = parse_table(b"b,z,a\n1,2,3\n", "t", Columns(("a", "b"), others_pass=True)).rows
    assert row.cells == {"a": "3", "b": "1", "z": "2"}
    with pytest.raises(ConfigError, match="unknown column 'z'"):
        parse_table(b"b,z,a\n1,2,3\n", "t", COLUMNS)


def test_a_field_that_never_ends_is_a_sentence() -> None:
    with pytest.raises(ConfigError, match="t, row 2: must be valid CSV, but: field larger"):
        parse_table(b"a,b\n" + b"x" * 200_000 + b",1\n", "t", COLUMNS)


def test_the_nearest_word_ignores_case_and_dashes() -> None:
    assert nearest("Usd-Per-H", ["usd_per_h", "count"]) == "usd_per_h"
    assert nearest("zzz", ["usd_per_h"]) == ""

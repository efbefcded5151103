from __future__ import annotations

from pathlib import Path

import pytest

from echo2.data.rows import Excluded, read_rows
from echo2.errors import ConfigError


def test_rows_of_every_format_have_the_number_a_person_finds_them_by(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n')
    (tmp_path / "a.json").write_text('[{"a": 1}, {"a": 2}]')
    (tmp_path / "a.csv").write_text('a,b\n1,"two\nlines"\n2,c\n')
    read = {suffix: list(read_rows(str(tmp_path / f"a.{suffix}"), "t")) for suffix in ("jsonl", "json", "csv")}
    assert read["jsonl"] == [(1, {"a": 1}), (3, {"a": 2})]
    assert read["json"] == [(1, {"a": 1}), (2, {"a": 2})]
    assert read["csv"] == [(3, {"a": "1", "b": "two\nlines"}), (4, {"a": "2", "b": "c"})]


def test_parquet_rows_are_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": [1, 2], "b": ["x", None]}), tmp_path / "a.parquet")
    assert list(read_rows(str(tmp_path / "a.parquet"), "t")) == [(1, {"a": 1, "b": "x"}), (2, {"a": 2, "b": None})]
    (tmp_path / "b.parquet").write_bytes(b"no table")
    with pytest.raises(ConfigError, match="must be a Parquet file"):
        list(read_rows(str(tmp_path / "b.parquet"), "t"))


def test_a_bad_row_is_a_fault_of_its_own_and_a_bad_file_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('no\n[1]\n{"a": 1}\n')
    rows = dict(read_rows(str(tmp_path / "a.jsonl"), "t"))
    assert "must be a JSON object" in str(rows[1])
    assert "got a list" in str(rows[2])
    assert rows[3] == {"a": 1}
    (tmp_path / "a.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match="expected an array of objects, got dict"):
        list(read_rows(str(tmp_path / "a.json"), "t"))
    with pytest.raises(ConfigError, match=r"t: path must name a readable file, got '.*b\.csv': No such file"):
        list(read_rows(str(tmp_path / "b.csv"), "t"))
    assert str(Excluded("a.jsonl", 3, "odd")) == "a.jsonl, row 3: odd"

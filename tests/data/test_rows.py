from __future__ import annotations

import math
from decimal import Decimal
from pathlib import Path

import pytest

from echo2.data.rows import Excluded, answer_of, read_rows, text_of
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


def test_a_mark_of_byte_order_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    for suffix, text in (("jsonl", '{"a": "1"}\n'), ("json", '[{"a": "1"}]'), ("csv", "a\n1\n")):
        (tmp_path / f"a.{suffix}").write_text(text, encoding="utf-8-sig")
        assert [row for _, row in read_rows(str(tmp_path / f"a.{suffix}"), "t")] == [{"a": "1"}]


def test_what_no_reader_survives_is_a_fault_of_its_row_or_file(tmp_path: Path) -> None:
    deep = "[" * 200_000
    (tmp_path / "a.jsonl").write_text(f'{deep}\n{{"a": 1}}\n{{"a": "\\ud800"}}\n\x00\n')
    rows = dict(read_rows(str(tmp_path / "a.jsonl"), "t"))
    assert [number for number, row in rows.items() if isinstance(row, ValueError)] == [1, 3, 4]
    (tmp_path / "a.json").write_text(deep)
    (tmp_path / "b.jsonl").mkdir()
    (tmp_path / "b.parquet").mkdir()
    (tmp_path / "c.csv").write_bytes(b"a\n\xff\xfe\n")
    for name in ("a.json", "b.jsonl", "b.parquet", "c.csv"):
        with pytest.raises(ConfigError, match=r"^t: "):
            list(read_rows(str(tmp_path / name), "t"))
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert not list(read_rows(str(tmp_path / "empty.jsonl"), "t"))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5"),
        (-0.5, "-0.5"),
        (1e-07, "0.0000001"),
        (1e22, "1" + "0" * 22),
        (18.0, "18.0"),
        ("1e-07", "1e-07"),
        (Decimal("2.50"), "2.50"),
    ],
)
def test_a_gold_number_is_written_without_an_exponent(value: object, text: str) -> None:
    assert answer_of("answer", value) == text


@pytest.mark.parametrize("value", [None, True, [5], math.nan, math.inf, {"a": 1}])
def test_what_is_no_gold_answer_is_named(value: object) -> None:
    with pytest.raises(ValueError, match=r"^field answer must be a"):
        answer_of("answer", value)


def test_a_question_is_a_text_that_a_model_could_read() -> None:
    assert text_of("q", "why?") == "why?"
    for wrong, words in ((None, "got None"), (" ", "must be a text"), ("x" * 1_000_001, "at most 1000000 characters")):
        with pytest.raises(ValueError, match=words) as told:
            text_of("q", wrong)
        assert len(str(told.value)) < 200

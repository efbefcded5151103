from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.provisioning.cells import BadCell, Quantity, shorten

PRICE = Quantity("USD per hour", over=0.0)


@given(st.floats(min_value=1e-300, max_value=1e9))
def test_every_number_that_a_program_writes_reads_back(value: float) -> None:
    assert PRICE.read(repr(value)) == value


@given(st.text(max_size=30))
def test_a_text_is_a_number_in_range_or_a_sentence(text: str) -> None:
    try:
        value = PRICE.read(text)
    except BadCell as error:
        value = 1.0
        assert_sentence = str(error)
    else:
        assert_sentence = "must"
    assert 0 < value <= 1e9
    assert assert_sentence.startswith("must")


@pytest.mark.parametrize("text", ["1_0", "1e", "٣", "1 2", "0x1", "--1", "1.2.3", "", " ", "True"])
def test_what_only_looks_like_a_number_is_none(text: str) -> None:
    with pytest.raises(BadCell, match="must be a plain number"):
        PRICE.read(text)


def test_a_long_cell_is_shortened() -> None:
    assert len(shorten("x" * 1000)) == 42

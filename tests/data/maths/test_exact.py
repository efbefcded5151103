from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.data.maths.exact import Kind, choices, compare, for_algebra, is_prose
from echo2.data.maths.plain import read


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("18", 18), ("018", 18), ("+18", 18), ("18.0", 18), ("18.", 18), ("-18", -18), ("\u221218", -18), (".5", "1/2"),
        ("1,234,567", 1234567), ("1{,}234", 1234), (r"1\,234", 1234), ("1 234", 1234), ("3/4", "3/4"), ("-3/4", "-3/4"),
        (r"\frac{3}{4}", "3/4"), (r"\dfrac34", "3/4"), (r"-\frac{3}{4}", "-3/4"), (r"\frac{-3}{4}", "-3/4"),
        (r"1\frac{1}{2}", "3/2"), ("1 1/2", "3/2"), (r"1.5 \times 10^{3}", 1500), (r"2\cdot10^{-2}", "1/50"),
        (r"\$18", 18), ("$18$", 18), ("-$18", -18), ("$-18", -18), (r"18\text{ dollars}", 18), ("18 apples", 18),
        ("18 dollars per week", 18), (r"18\ \mathrm{cm}^2", 18), ("18cm", 18), ("18 km/h", 18), (r"104^\circ", 104),
        (r"104^{\circ}", 104), ("104°", 104), ("**73**", 73), (r"\mathbf{73}", 73), (r"\textbf{73}", 73), ("{73}", 73),
        ("x = 5", 5), ("2+3=5", 5), (r"\left(5\right)", None), ("5x", None), ("5 x", None), ("5ab", None), ("x", None),
        ("2+3", None), ("5^2", None), ("5!", None), ("1e5", None), ("", None), ("1/0", None), (r"\frac{1}{0}", None),
        ("x \\le 5", None), ("x >= 5", None), ("--5", None), (r"10^{10^{10}}", None), (r"1\times10^{99999}", None),
        ("five", None), (r"\sqrt{2}", None), ("5 and", None),
    ],
)  # fmt: skip
def test_a_number_is_read_as_the_rational_that_its_digits_say(text: str, value: int | str | None) -> None:
    plain = read(text)
    if value is None:
        assert plain is None
    else:
        assert plain is not None and [number.value for number in plain.numbers] == [Fraction(value)]


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("1331 and 1728", "1728, 1331", True),
        ("1331 and 1728", "1728", False),
        ("1331, 1728", r"1331 \text{ and } 1728", True),
        (r"\{1,2\}", "2, 1", True),
        ("1, 1, 2", "1, 2, 2", False),
        ("(1, 2)", "(2, 1)", False),
        ("(1, 2)", "1, 2", True),
        (r"\pm 2021", "2021", False),
        (r"\pm 2021", r"2021 \text{ or } -2021", True),
        ("50", r"50\%", True),
        ("0.5", r"50\%", True),
        (r"50\%", "0.5", True),
        (r"50\%", r"0.5\%", False),
        ("1/3", "0.333", False),
        ("0.5", r"\frac{1}{2}", True),
        ("Yes", r"\text{yes}", True),
        ("Alice", r"\text{Bruno}", False),
        ("5", r"\text{not unique}", False),
        ("x^2+1", "x^{2} + 1", None),
        ("x^2+1", " x^2 + 1.", True),
        ("2", r"\sqrt{4}", None),
        ("2", "2}", False),
    ],
)
def test_three_values_equal_different_or_left_to_algebra(gold: str, answer: str, same: bool | None) -> None:
    assert compare(gold, answer) is same


def test_a_number_is_all_that_answers_a_question_for_a_number() -> None:
    assert compare("8", "2^3", "number") is False
    assert compare("8", "2^3") is None


def test_a_tolerance_holds_only_for_golds_with_a_decimal_point() -> None:
    assert compare("2.35", "2.36", "number", 0.01) is True
    assert compare("2.35", "2.37", "number", 0.01) is False
    assert compare("2", "2.005", "number", 0.01) is False


@pytest.mark.parametrize(
    ("text", "letters"),
    [
        ("A", "A"), ("(B)", "B"), ("AC", "AC"), ("A, C", "AC"), ("(A), (C) and (D)", "ACD"), (r"\text{(B)}", "B"),
        (r"\textbf{(B)}\ 12", "B"), ("B. 12 metres", "B"), ("12", ""), ("Apples", ""), ("", ""),
    ],
)  # fmt: skip
def test_choices_are_letters(text: str, letters: str) -> None:
    assert choices(text) == (frozenset(letters) or None)
    kind: Kind = "choice"
    assert compare("CA", text, kind) is (letters == "AC")


def test_prose_is_told_from_formulas_and_short_answers() -> None:
    assert is_prose("all the primes p such that p divides n")
    assert not is_prose("no such integer exists")
    assert not is_prose(r"\frac{\sin x}{\cos y} \text{ for } x > 0")


def test_symbols_become_the_commands_that_the_grammar_knows() -> None:
    assert for_algebra("pi*r²") == r"\pi \cdot r^{2}"
    assert for_algebra(r"$\sin x ≤ 1$") == r"\sin x \le  1"


@given(st.fractions(max_denominator=10**6), st.integers(2, 9))
@settings(max_examples=60)
def test_every_way_to_write_a_fraction_is_the_same_number(value: Fraction, factor: int) -> None:
    above, below = value.numerator * factor, value.denominator * factor
    sign, above = ("-" if above < 0 else ""), abs(above)
    written = rf"{sign}\frac{{{above}}}{{{below}}}"
    for text in (f"{sign}{above}/{below}", written, f"x = {written}"):
        assert compare(str(value), text) is True
        assert compare(str(value + 1), text) is False
        if value:
            assert compare(str(-value), text) is False


@given(st.text(alphabet=r"0123456789.,/%{}()\-+= $frac^xe", max_size=40), st.text(max_size=40))
@settings(max_examples=150)
def test_no_text_makes_a_comparison_fail(gold: str, answer: str) -> None:
    for kind in ("number", "expression", "choice"):
        compare(gold, answer, kind)  # type: ignore[arg-type]

from __future__ import annotations

from fractions import Fraction

import pytest

from echo2.data.gyms.reasoning.guards import FUNCTIONS, check, literal
from echo2.data.gyms.reasoning.plain import plain, restored


@pytest.mark.parametrize(("text", "value"), [("[1, [2]]", [1, [2]]), ("(3 + 4) * -2", -14), ("['a', 'b']", ["a", "b"])])
def test_literals_and_operators_are_evaluated(text: str, value: object) -> None:
    assert literal(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "open('x')",
        "().__class__",
        "[x for x in (1, 2)]",
        "a",
        "lambda: 0",
        "f'{1}'",
        "(y := 1)",
        "x[0]",
    ],
)
def test_nothing_else_is(text: str) -> None:
    with pytest.raises(ValueError, match="an expression must"):
        literal(text)


@pytest.mark.parametrize("text", ["x**2/2 + C", "sin(x)*exp(-x)", "(6 * 3) + 6", "2*sqrt(x)"])
def test_mathematics_passes(text: str) -> None:
    check(text, FUNCTIONS)


@pytest.mark.parametrize(
    "text",
    [
        "open(x)",
        "x.evalf()",
        "sin(x).args",
        "Symbol('x')",
        "sqrt(x, evaluate=0)",
        "__import__",
        "sin()(x)",
        "x" * 30_000,
    ],
)
def test_what_is_no_mathematics_does_not(text: str) -> None:
    with pytest.raises(ValueError, match="an expression must"):
        check(text, FUNCTIONS)


@pytest.mark.parametrize(
    "value", [((1, 2), [3, (4,)]), {1: "a", "b": None}, {"\u0000tuple": 1}, [{"x": (1.5, True)}], Fraction(2**70, 3)]
)
def test_metadata_keeps_its_types(value: object) -> None:
    assert restored(plain(value)) == value
    assert repr(restored(plain(value))) == repr(value)


def test_what_cannot_travel_is_refused() -> None:
    with pytest.raises(TypeError, match="texts, numbers, lists, tuples or tables, got set"):
        plain({"a": {1}})

r"""Comparison of expressions with math-verify. Runs only in a process that may be killed.

Invariant: text becomes an expression through math-verify's LaTeX grammar and in no other way; its parser of plain
expressions, which evaluates Python, is never used. Where math-verify says "equal" of numbers that it only compared to
some digits, the numbers must agree to ``DIGITS`` digits, decimals taken as the rationals they are (A12): 1/2^99 is not
1/2^98, and 1.414214 is not √2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import (
    Basic,
    Eq,
    Expr,
    FiniteSet,
    Float,
    Interval,
    Rational,
    Symbol,
    Tuple,
    UnevaluatedExpr,
    default_sort_key,
)
from sympy.core.function import AppliedUndef

_LATEX = (LatexExtractionConfig(boxed_match_priority=0),)
DIGITS = 40
PROBE_DIGITS = 30
PROBE_AGREEMENT = Rational(1, 10**12)


@lru_cache(maxsize=4096)
def gold_expression(gold: str) -> Any | None:
    """A gold is compared with many replies and read once."""
    return expression(gold)


def expression(text: str) -> Any | None:
    """None for what is no expression. In a box, for which math-verify has a rule that takes the whole content."""
    found = parse(
        rf"\boxed{{{text}}}",
        _LATEX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found else None


def equal(gold: Any, answer: Any) -> bool:
    """Whether the answer is the gold, which decides how the answer is read: the order matters (A16)."""
    if _refuted(gold, answer) or not verify(gold, answer, timeout_seconds=None):
        return False
    return _agree(_members(gold), _members(answer))


def _refuted(gold: Any, answer: Any) -> bool:
    """Whether the two have different values at a point, which is found much sooner than that they cannot be made equal.

    Only for expressions in the same symbols, and for equations that say what one symbol or function is.
    """
    if isinstance(gold, Eq) and isinstance(answer, Eq):
        subject = gold.lhs
        if subject != answer.lhs or not isinstance(subject, Symbol | AppliedUndef):
            return False
        gold, answer = gold.rhs, answer.rhs
        if gold.has(subject) or answer.has(subject):
            return False
    if not (isinstance(gold, Expr) and isinstance(answer, Expr)) or gold.has(UnevaluatedExpr):
        return False
    symbols = gold.free_symbols
    if symbols != answer.free_symbols or answer.has(UnevaluatedExpr) or isinstance(gold, Symbol):
        return False
    # Positive and of no special relation to each other.
    point = {symbol: Rational(1931 + 757 * i, 977) for i, symbol in enumerate(sorted(symbols, key=str))}
    first, second = (value.subs(point).doit().evalf(PROBE_DIGITS) for value in (gold, answer))
    if not (first.is_number and second.is_number and first.is_finite and second.is_finite):
        return False
    return bool(abs(first - second) > PROBE_AGREEMENT * max(abs(first), abs(second)))


def _members(value: Any) -> Sequence[Any]:
    if isinstance(value, Eq):
        return _members(value.rhs)
    if isinstance(value, FiniteSet):
        return sorted((member.rhs if isinstance(member, Eq) else member for member in value.args), key=_place)
    if isinstance(value, Tuple):
        return list(value.args)
    if isinstance(value, Interval):
        return [value.start, value.end]
    return [value]


def _place(member: Any) -> Any:
    return default_sort_key(member.evalf()) if isinstance(member, Basic) else str(member)


def _agree(golds: Sequence[Any], answers: Sequence[Any]) -> bool:
    """Members that are not numbers, and shapes that differ, are left to what math-verify said of them."""
    if len(golds) != len(answers):
        return True
    return all(_near(gold, answer) for gold, answer in zip(golds, answers, strict=True))


def _near(gold: Any, answer: Any) -> bool:
    if not (_is_number(gold) and _is_number(answer)):
        return True
    first, second = _exact(gold), _exact(answer)
    if first == second:
        return True
    first, second = first.evalf(DIGITS + 10), second.evalf(DIGITS + 10)
    return bool(abs(first - second) <= Rational(1, 10**DIGITS) * max(abs(first), abs(second)))


def _is_number(value: Any) -> bool:
    return isinstance(value, Basic) and bool(getattr(value, "is_number", False)) and not value.is_infinite


def _exact(value: Any) -> Any:
    """Decimals as the rationals that their digits say."""
    return value.doit().xreplace({number: Rational(str(number)) for number in value.doit().atoms(Float)})

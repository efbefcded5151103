r"""Comparison of answers that needs no algebra: plain values, choices, words, and the same text.

Invariant: pure and cheap. True and False are final; None means that the two must be compared as expressions.
Gold and answer are not interchangeable: the gold decides how the answer is read (A16).

- numbers are equal as exact rationals: 0.333 is not 1/3, and 3.0000001 is not 3 (A12). A tolerance, where a benchmark
  has one, holds only for a gold that is written with a decimal point.
- 50 % equals 50 and equals 0.5; two percentages must agree as they are. Units and degree signs are passed over on both
  sides, whatever they say.
- a list must hold the same numbers as often; in the same order where either is in parentheses.
- choices are letters, compared as a set: ``(A), (C)``, ``AC`` and ``C and A`` are the same.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from echo2.data.maths.plain import Number, Plain, read_tidied, tidy

Kind = Literal["number", "expression", "choice"]
"""number: a plain value, and nothing else will do. expression: anything. choice: letters of a multiple choice."""

MAX_ANSWER_CHARS = 4000
"""A longer answer is not compared and scores 0; a longer gold is left out of the data."""

_TEXT_COMMAND = re.compile(r"\\(?:text|textrm|textit|mathrm|mbox|operatorname)\s*\{([^{}]*)\}")
_WORDS = re.compile(r"(?=.*[A-Za-z]{2})[A-Za-z][A-Za-z' -]*")
_CHOICE = re.compile(r"[(\[]?([A-Z])[)\].:]?")
_CHOICE_WITH_TEXT = re.compile(r"(?:\(([A-Z])\)|([A-Z])[).:])\s*\S")
_WORD_RUN = re.compile(r"(?<![\\A-Za-z])[A-Za-z]+(?:[,;:]?\s+[A-Za-z]+)+")
_BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
_SYMBOLS = {
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ",
    "*": r"\cdot ", "√": r"\sqrt", "∪": r"\cup ", "±": r"\pm ", "²": "^{2}", "³": "^{3}",
}  # fmt: skip
_PLAIN_NAMES = re.compile(r"(?<![\\A-Za-z])(pi|infty|ln|log|sin|cos|tan)(?![A-Za-z])")
_CHOICE_GAP = re.compile(r"(?:[\s,;&/]|\band\b)*")


def compare(gold: str, answer: str, kind: Kind = "expression", tolerance: float = 0.0) -> bool | None:
    """Whether ``answer`` says what ``gold`` says; None where only algebra could tell."""
    if kind == "choice":
        return choices(answer) == choices(gold)
    gold_text, expected = _gold(gold)
    answer_text = tidy(answer)
    if answer_text == gold_text:
        return True
    given = read_tidied(answer_text)
    if expected is not None and given is not None:
        return _same(expected, given, tolerance if "." in gold_text else 0.0)
    if kind == "number" or not _balanced(answer_text):
        return False
    expected_words = words(gold_text)
    if expected_words and expected_words == words(answer_text):
        return True
    if is_phrase(expected_words) or (expected is not None and is_phrase(words(answer_text))):
        return False
    return _squeezed(gold_text) == _squeezed(answer_text) or None


@lru_cache(maxsize=8192)
def _gold(text: str) -> tuple[str, Plain | None]:
    """A gold is compared with all replies of its groups: it is read once."""
    tidied = tidy(text)
    return tidied, read_tidied(tidied)


def is_plain(gold: str) -> bool:
    """Whether ``gold`` is a plain value."""
    return _gold(gold)[1] is not None


def choices(text: str) -> frozenset[str] | None:
    r"""The letters that ``text`` chooses; None where it is no choice. ``\text{(B) } 12`` chooses B."""
    text = _TEXT_COMMAND.sub(r"\1", tidy(text)).replace("{", "").replace("}", "").strip()
    with_text = _CHOICE_WITH_TEXT.match(text)
    found: set[str] = set()
    place = 0
    while place < len(text):
        letter = _CHOICE.match(text, place)
        if letter is None:
            return frozenset((with_text[1] or with_text[2],)) if with_text and len(found) < 2 else None
        found.add(letter[1])
        gap = _CHOICE_GAP.match(text, letter.end())
        place = gap.end() if gap else letter.end()
    return frozenset(found) or None


def words(text: str) -> str:
    """A text of words alone, in lower case; empty for anything else, one-letter names included."""
    text = " ".join(_TEXT_COMMAND.sub(r" \1 ", text).split()).strip(" .")
    return text.lower() if _WORDS.fullmatch(text) else ""


def is_phrase(text: str) -> bool:
    """Whether these words are words, not a product of letters such as ``abc``."""
    return any(len(word) > 3 for word in text.split())


def is_prose(text: str) -> bool:
    """Whether a gold says in words what no reply will say in the same ones."""
    runs = _WORD_RUN.findall(_TEXT_COMMAND.sub(r" \1 ", text))
    return any(len(run) > 4 and sum(len(word) > 1 for word in run) > 3 for run in map(str.split, runs))


def for_algebra(text: str) -> str:
    """``text`` in the LaTeX that the grammar of expressions knows."""
    text = tidy(text).replace("$", " ")
    for symbol, command in _SYMBOLS.items():
        text = text.replace(symbol, command)
    return _PLAIN_NAMES.sub(r"\\\1 ", text).strip()


def _balanced(text: str) -> bool:
    depth = 0
    for brace in _BRACES.finditer(text):
        depth += {"{": 1, "}": -1}.get(brace[0], 0)
        if depth < 0:
            return False
    return depth == 0


def _squeezed(text: str) -> str:
    """Without white space, except where it ends a command's name."""
    return re.sub(r"\s+", "", re.sub(r"(\\[A-Za-z]+)\s+(?=[A-Za-z])", r"\1{}", text))


def _same(gold: Plain, answer: Plain, tolerance: float) -> bool:
    if len(gold.numbers) != len(answer.numbers):
        return False
    if gold.ordered or answer.ordered:
        return all(_equal(g, a, tolerance) for g, a in zip(gold.numbers, answer.numbers, strict=True))
    left = list(answer.numbers)
    for number in gold.numbers:
        match = next((i for i, other in enumerate(left) if _equal(number, other, tolerance)), None)
        if match is None:
            return False
        del left[match]
    return True


def _equal(gold: Number, answer: Number, tolerance: float) -> bool:
    if gold.percent == answer.percent:
        return _near(gold.value, answer.value, tolerance)
    share, other = (gold.value, answer.value) if gold.percent else (answer.value, gold.value)
    return _near(share, other, tolerance) or _near(share / 100, other, tolerance / 100)


def _near(gold: Fraction, answer: Fraction, tolerance: float) -> bool:
    return gold == answer or abs(gold - answer) <= Fraction(str(tolerance))

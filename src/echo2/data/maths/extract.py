r"""The one rule by which the answer is found in a reply, in training, evaluation and by hand (A03, A16).

Invariant: pure, linear in the length of the reply, and without a window (A07). The first of these that a reply has is
its answer:

1. the content of the last closed ``\boxed{…}`` (``\fbox`` too; of nested ones the inner); an empty one is no answer
2. what stands after the last ``Answer:``, ``answer is`` or ``####``: formula or sentence on that line, or the next line
3. only where the prompt asks for a bare number, and where no digit stands in those places: the number that the reply
   ends with, a unit of one or two words aside

A number in the middle of prose is never an answer (A05).
"""

from __future__ import annotations

import re

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"))
"""Dashes that are typed for a minus sign; the em dash is punctuation."""

_BRACE = re.compile(r"\\(?:boxed|fbox)\s*\{|\\.|[{}]", re.DOTALL)
_MARK = re.compile(r"####|\banswer\b[*_\s]*(?:\bis\b[*_ \t]*:?|:)", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"[.!?]\s++(?=[A-Z])|(?:,|(?<![\s,]))\s++(?:because|since|which|as|so|I hope)\b")
"""A run of spaces is looked at once, from its beginning: from each of its places it would take the square of it."""
_BEFORE_ANSWER = re.compile(r"(?:\.{2,}|…|[\s*_`:=])+")
_DIGIT = re.compile("[0-9]")
_MARKUP = " \t\r\n*_`"

WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<![0-9]\.)(?P<sign>(?<![0-9A-Za-z.)\]}])[+-])?"
    rf"(?:{WHOLE}(?:\.[0-9]+)?|(?<![0-9A-Za-z.])\.[0-9]+)(?P<exponent>[eE][+-]?[0-9]+)?(?:/[0-9]+)?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_AFTER_NUMBER = re.compile(r"""[\s.,!?*_$)\]}"'`°%\\]*+(?:[A-Za-z]++[ ]?){0,2}[\s.!?*_$)\]}"'`]*""")


def plain_minus(text: str) -> str:
    """``text`` with the dashes that stand for minus signs as ``-``."""
    return text.translate(_MINUS)


def find_answer(reply: str, *, bare_number: bool = False) -> str | None:
    """The text of the reply's answer; None where it gives none. ``bare_number`` allows the third place."""
    box = _last_box(reply)
    if box is not None:
        return box.strip() or None
    marked = _after_mark(reply)
    if marked is None or (bare_number and not _DIGIT.search(marked)):
        return _closing_number(reply) if bare_number else None
    return marked or None


def _last_box(text: str) -> str | None:
    """Content of the box that opens last among those that are closed."""
    if "boxed" not in text and "fbox" not in text:
        return None
    last: tuple[int, int] | None = None
    opened: list[int] = []
    for token in _BRACE.finditer(text):
        if token[0] == "{":
            opened.append(-1)
        elif token[0] == "}":
            if opened and (start := opened.pop()) > (last[0] if last else 0):
                last = (start, token.start())
        elif token[0].endswith("{") and len(token[0]) > 2:  # not \{, which is printed
            opened.append(token.end())
    return text[last[0] : last[1]] if last else None


def _after_mark(text: str) -> str | None:
    """What stands after the last mark; empty where nothing does."""
    marks = list(_MARK.finditer(text))
    if not marks:
        return None
    mark = marks[-1]
    rest = text[mark.end() :]
    before = _BEFORE_ANSWER.match(rest)
    rest = rest[before.end() :] if before else rest
    formula = _FORMULA.match(rest)
    if formula:
        return next(part for part in formula.groups() if part is not None).strip()
    line = rest.partition("\n")[0]
    end = _SENTENCE_END.search(line)
    return (line[: end.start()] if end else line).strip(_MARKUP).removesuffix(".").strip(_MARKUP)


def _closing_number(text: str) -> str | None:
    text = _FRACTION.sub(r"\1/\2", plain_minus(text).replace("{,}", ","))
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    found = numbers[-1]
    if found["exponent"] or not _AFTER_NUMBER.fullmatch(text, found.end()):
        return None
    percent = "%" if text[found.end() :].lstrip("\\ ").startswith("%") else ""
    return found[0] + percent

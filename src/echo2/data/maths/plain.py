r"""Plain values: numbers, and lists of numbers, as a model writes them.

Invariant: ``read`` returns exact rationals or None; it computes nothing but what the digits say, so no text is dear
(A08). None means "not a plain value", never "wrong": another way of comparing may still read it.

Read as the same number: ``18``, ``018``, ``+18``, ``18.0``, ``18.``, ``\$18``, ``18\text{ dollars}``, ``18 apples``,
``x = 18``, ``\frac{36}{2}``, ``36/2``, ``17\frac{2}{2}``, ``1.8 \times 10^{1}``; digits grouped by commas or thin
spaces. A degree sign and a unit are passed over, a per cent sign is kept beside the number. ``5x`` is no number: what
touches the digits must be a unit in ``\text{…}`` or one of a few abbreviations.
"""

from __future__ import annotations

import re
from fractions import Fraction

import msgspec

from echo2.data.maths.extract import WHOLE, plain_minus

MAX_DIGITS = 1000
"""A longer run of digits is no plain value: no benchmark has one, and arithmetic on it could be made slow (A08)."""
MAX_EXPONENT = 400
MAX_ITEMS = 64

_UNIT_LETTERS = "cm|mm|km|dm|nm|kg|mg|ml|mL|ft|lb|lbs|oz|mph|hr|hrs|min|sec|Hz|kHz|eV|kJ|kW|Pa|mol|rad"
_TEXT = r"\\(?:text|textrm|mathrm|mbox|textit|operatorname|rm)\s*\{[^{}]*\}"
_UNIT = (
    rf"(?:\s*(?:{_TEXT}|(?<![A-Za-z\\])(?:{_UNIT_LETTERS})(?![A-Za-z])|\s(?:per\s+|an?\s+|of\s+)?[A-Za-z]{{3,}}(?![A-Za-z{{]))"
    rf"\.?(?:\^\s*\{{?[23]\}}?|[²³])?(?:\s*/\s*(?:{_TEXT}|[A-Za-z]{{1,8}})(?:\^\s*\{{?[23]\}}?|[²³])?)?)"
)
_CURRENCY = r"(?:(?:\\?\$|€|£|¥|₹|\\pounds|\\text\{\\?\$\}|USD|Rs\.?)\s*)?"
_SUFFIX = re.compile(
    rf"(?P<percent>\s*(?:\\?%|percent\b|\\text\{{\s*(?:percent|\\?%)\s*\}}))?"
    rf"(?:\s*(?:\^\s*\{{?\\circ\}}?|°|\\degree)(?:\s*[CF]\b)?)?(?:\s*(?:\\?\$|€|£|¥|₹))?{_UNIT}{{0,4}}\s*"
)
_CORE = re.compile(
    rf"(?P<sign>[+-])?\s*{_CURRENCY}(?P<late_sign>-)?"
    rf"(?:(?P<whole>{WHOLE})(?:\.(?P<decimals>[0-9]*))?|\.(?P<part>[0-9]+))?"
    r"(?:(?<=[0-9])\s*/\s*(?P<below>[0-9]+)|"
    r"\s*\\frac\s*(?:\{\s*(?P<sign_above>-?)(?P<above>[0-9]+)\s*\}|(?P<above1>[0-9]))"
    r"\s*(?:\{\s*(?P<under>[0-9]+)\s*\}|(?P<under1>[0-9]))|"
    r"\s+(?P<mixed_above>[0-9]+)/(?P<mixed_below>[0-9]+))?"
    r"(?:\s*(?:\\times|\\cdot|×|·)\s*10\s*\^\s*\{?\s*(?P<exponent>-?[0-9]+)\s*\}?)?"
)
_BOLD = re.compile(r"\\(?:textbf|mathbf|boldsymbol|bm|bf|displaystyle|textstyle)(?![A-Za-z])\s*")
_SPACES = re.compile(
    r"\\[,;:! ]|~|\\q?quad(?![A-Za-z])|\\(?:left|right|big|Big)(?![A-Za-z])|\\[()\[\]]|(?<!\\)\$\$?$|^\$\$?"
)
_GROUPS = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|\{,\}|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))")
_SPACED_GROUPS = re.compile(r"([+-]?[0-9]{1,3})((?: [0-9]{3})+)")
_AND = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|\b(?:and|or)\b")
_BRACKETS = {"(": ")", "{": "}", "\\{": "\\}"}


class Number(msgspec.Struct, frozen=True):
    value: Fraction
    percent: bool = False
    """The text has a per cent sign; ``value`` is what stands before it."""


class Plain(msgspec.Struct, frozen=True):
    numbers: tuple[Number, ...]
    ordered: bool = False
    """Written in parentheses: a point, not a set."""


def tidy(text: str) -> str:
    """``text`` without what only concerns its looks: kinds of dashes and spaces, bold, sizes of brackets, full stop."""
    text = plain_minus(text).strip(" \t\r\n*`")
    text = _GROUPS.sub("", text)
    text = _SPACES.sub(" ", _BOLD.sub(" ", text)).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = text.strip(" \t\r\n,;")
    while text.startswith("{") and text.endswith("}") and _closes_at_end(text):
        text = text[1:-1].strip()
    return text[:-1].rstrip() if text.endswith(".") and not text.endswith("\\.") else text


def _closes_at_end(text: str) -> bool:
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return place == len(text) - 1
    return False


def read(text: str) -> Plain | None:
    """The plain value that ``text`` (an answer, not a reply) gives; None for anything else."""
    return read_tidied(tidy(text))


def read_tidied(text: str) -> Plain | None:
    if len(text) > 4 * MAX_DIGITS or not any(letter.isdigit() for letter in text):
        return None
    listed = _AND.search(text) is not None or ";" in text
    if not listed:
        side = text.rpartition("=")[2] if "," not in text and not re.search(r"[<>]=|\\[lg]e", text) else text
        single = _signed(side.strip())
        if single is not None:
            return single
    return _listed(text)


def _signed(text: str) -> Plain | None:
    for sign in ("\\pm", "±"):
        if text.startswith(sign):
            number = _number(text.removeprefix(sign).strip())
            if number is None or number.value < 0:
                return None
            return Plain((number, Number(-number.value, number.percent)))
    number = _number(text)
    return None if number is None else Plain((number,))


def _listed(text: str) -> Plain | None:
    ordered = False
    for opening, closing in _BRACKETS.items():
        if text.startswith(opening) and text.endswith(closing):
            text, ordered = text[len(opening) : -len(closing)].removesuffix("\\"), opening == "("
            break
    items = [item.strip() for item in re.split(r"[,;]", _AND.sub(",", text)) if item.strip()]
    if len(items) < 2 or len(items) > MAX_ITEMS:
        return None
    numbers = [_number(item) for item in items]
    if any(number is None for number in numbers):
        return None
    return Plain(tuple(number for number in numbers if number is not None), ordered)


def _number(text: str) -> Number | None:
    grouped = _SPACED_GROUPS.match(text)
    if grouped and grouped.end() == len(text):
        text = text.replace(" ", "")
    core = _CORE.match(text)
    if core is None or core.end() == 0:
        return None
    suffix = _SUFFIX.fullmatch(text, core.end())
    value = _value(core) if suffix else None
    return None if value is None or suffix is None else Number(value, suffix["percent"] is not None)


def _value(core: re.Match[str]) -> Fraction | None:
    """None for what gives no number after all: no digits, too many of them, a denominator of zero."""
    above, under = core["above"] or core["above1"], core["under"] or core["under1"]
    digits = core["whole"] or core["part"]
    if digits is None and above is None:
        return None
    if sum(len(part) for part in core.groups() if part) > MAX_DIGITS:
        return None
    below = core["below"] or under or core["mixed_below"]
    if below is not None and not below.strip("0"):
        return None
    if core["sign"] and (core["late_sign"] or core["sign_above"]):
        return None
    value = Fraction(f"{(core['whole'] or '0').replace(',', '')}.{core['decimals'] or core['part'] or '0'}")
    if core["below"] is not None:
        value /= int(core["below"])
    elif below is not None:
        if digits is not None and (core["decimals"] is not None or core["sign_above"]):
            return None
        value += Fraction(int(above or core["mixed_above"]), int(below))
    exponent = core["exponent"]
    if exponent is not None:
        if len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT:
            return None
        value *= Fraction(10) ** int(exponent)
    negative = "-" in (core["sign"], core["late_sign"], core["sign_above"])
    return -value if negative else value

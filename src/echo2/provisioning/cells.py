"""One cell of a price list: from text to a number in the unit of its column, or a sentence.

Invariant: a number comes back only when the text is that plain number and lies in the column's range. Nothing is
converted silently: a currency, a unit, a percent sign or a separator of thousands is refused, and the sentence says
what to write instead. 1 GB is 10⁹ bytes, 1 Mbps is 10⁶ bits per second.
"""

from __future__ import annotations

import math
import re

import msgspec

from echo2.errors import UserError

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
UNKNOWN_ADVICE = "; leave the whole row out if it is not known"
_SHOWN = 40
"""Characters of a cell that a sentence repeats."""
_CURRENCY = re.compile(r"[$€£¥₹]|\b(?:usd|eur|gbp|cny|rmb|jpy|chf|cad|aud|inr)\b", re.IGNORECASE)
_SEPARATED = re.compile(r"[+-]?\d+(?:[,_'’  \u202f]\d+)+(?:\.\d*)?")
_BYTES = re.compile(r"([+-]?\d+\.?\d*)\s*([kKMGT]?)(i?)(bit|b|B|byte)s?(/s|ps|/sec)?", re.ASCII)
_POWER = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_RATES = {"Mbps": ("Mbps", 1.25e5), "MB per second": ("MB/s", 1e6)}
_SIZES = {"GB": ("GB", 1e9), "GiB": ("GiB", 2.0**30)}
"""What is written for a unit, and how many bytes, or bytes per second, it is."""


class BadCell(UserError):
    """What is wrong with one cell; who reads the table adds the row and the column."""


class Quantity(msgspec.Struct, frozen=True):
    """What a column holds.

    Example: ``Quantity("USD per hour", over=0.0).read("1.2") == 1.2``.
    """

    unit: str
    over: float | None = None
    """The value must exceed this."""
    least: float = -math.inf
    most: float = 1e9
    """Far above anything real, so that sums of a whole table stay finite."""
    whole: bool = False

    def read(self, text: str) -> float:
        """The number in ``text``. Raises BadCell."""
        text = text.strip()
        if not _NUMBER.fullmatch(text):
            raise BadCell(f"must be a plain number ({self.unit}), got {_advice(text, self.unit)}")
        value = float(text)
        if fault := self.fault(value, text):
            raise BadCell(fault)
        return value

    def fault(self, value: float, shown: str = "") -> str:
        """Why ``value`` cannot be: a sentence without its place; empty when it can."""
        if not math.isfinite(value):
            required = f"finite ({self.unit})"
        elif self.over is not None and value <= self.over:
            required = f"more than {self.over:g} ({self.unit})"
        elif value < self.least:
            required = f"at least {self.least:g} ({self.unit})"
        elif value > self.most:
            required = f"at most {self.most:g} ({self.unit})"
        elif self.whole and value != math.floor(value):
            required = f"a whole number ({self.unit})"
        else:
            return ""
        return f"must be {required}, got {shown[:_SHOWN] or format(value, 'g')}"


def shorten(text: str) -> str:
    """``text`` in quotes, cut to what a sentence can hold."""
    return repr(text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…")


def _advice(text: str, unit: str) -> str:
    """What was got instead of a number, and what to write."""
    shown = shorten(text)
    if not text:
        return "nothing"
    if text.lower().lstrip("+-") in ("nan", "inf", "infinity", "null", "none", "n/a", "na", "-"):
        return f"{shown}{UNKNOWN_ADVICE}"
    if _CURRENCY.search(text):
        return f"{shown}; convert it to USD and write the number alone, without a currency"
    if converted := _converted(text, unit):
        return f"{shown}; {converted}"
    if text.endswith("%"):
        return f"{shown}; write a share such as 0.98 in place of a percentage"
    if _SEPARATED.fullmatch(text):
        return f"{shown}; write it as in 1234.5, with a decimal point and without separators of thousands"
    if _NUMBER.match(text):
        return f"{shown}; convert it to {unit} and write the number alone"
    return shown


def _converted(text: str, unit: str) -> str:
    """An amount of bytes, or of bytes per second, in ``unit``; empty where one is not the other."""
    found = _BYTES.fullmatch(text)
    known = (_RATES if found and found[5] else _SIZES).get(unit)
    if found is None or known is None:
        return ""
    number, prefix, binary, kind, _ = found.groups()
    in_bytes = float(number) * (1024 if binary else 1000) ** _POWER[prefix] / (1 if kind in ("B", "byte") else 8)
    name, size = known
    return f"that is {in_bytes / size:.6g} {name}, so write {in_bytes / size:.6g}"

"""A problem's metadata as msgpack types, and back to what the library's scorer expects.

Invariant: ``restored(plain(value)) == value``, types of containers included: a scorer may compare boards of tuples, and
a list would not equal one. What cannot be written is a TypeError, never silently changed.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

_TUPLE, _PAIRS, _FRACTION = "\u0000tuple", "\u0000pairs", "\u0000fraction"
"""Keys of one-entry dictionaries: a tuple, a dictionary whose keys are no texts, a fraction as two texts."""


def plain(value: Any) -> Any:
    """``value`` of None, booleans, numbers (also fractions and numpy's), texts, lists, tuples and dictionaries."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, tuple):
        return {_TUPLE: [plain(item) for item in value]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and not value.keys() & {_TUPLE, _PAIRS, _FRACTION}:
            return {key: plain(item) for key, item in value.items()}
        return {_PAIRS: [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, Fraction):
        return {_FRACTION: [str(value.numerator), str(value.denominator)]}
    if hasattr(value, "item") and type(value).__module__ == "numpy":
        return plain(value.item())
    raise TypeError(f"a problem's metadata must be texts, numbers, lists, tuples or tables, got {type(value).__name__}")


def restored(value: Any) -> Any:
    if isinstance(value, list):
        return [restored(item) for item in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(restored(item) for item in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {restored(key): restored(item) for key, item in value[_PAIRS]}
        if value.keys() == {_FRACTION}:
            numerator, denominator = value[_FRACTION]
            return Fraction(int(numerator), int(denominator))
        return {key: restored(item) for key, item in value.items()}
    return value

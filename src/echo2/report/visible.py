"""Text of strangers, shown so that none of it can act.

Invariant: what ``visible`` returns has no control character but tab and line end, and nothing that reorders text.
"""

from __future__ import annotations

import unicodedata

BIDIRECTIONAL_MARKS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""They reorder the text around them; the joiners that scripts and emoji need are not among them."""


def visible(text: str) -> str:
    """``text`` with control characters and bidirectional marks shown as symbols, so that none can act."""
    return "".join(character if _is_harmless(character) else "\N{REPLACEMENT CHARACTER}" for character in text)


def _is_harmless(character: str) -> bool:
    return character in "\n\t" or (
        unicodedata.category(character) not in ("Cc", "Cs") and character not in BIDIRECTIONAL_MARKS
    )

"""The one action in a reply.

Invariant: a reply is an action or it is not; nothing is guessed. What stands in a think block does not count. If lines
begin with ``Action:`` there must be exactly one; without any, the whole reply must be the action. So ``FOLD.`` is an
action, and ``I won't raise 100, I fold`` is none.
"""

from __future__ import annotations

import re

_MARK = re.compile(r"^[^\w\n]*action[^\w\n]*:(.*)$", re.IGNORECASE | re.MULTILINE)
"""Within a line: a reply of many empty ones would be read from each of them to its end."""
_END_OF_THOUGHT = "</think>"
_THOUGHT = "<think>"
MAX_ACTION_CHARS = 60


def action_text(reply: str) -> str | None:
    """The action's words, lower case, single spaces, without decoration; None where there is not exactly one."""
    said = reply.rpartition(_END_OF_THOUGHT)[2]
    if _THOUGHT in said:
        return None  # a thought that never ended
    marked = _MARK.findall(said)
    if len(marked) > 1:
        return None
    words = re.sub(r"[*`\"'\[\]()]", " ", (marked[0] if marked else said).casefold())
    words = " ".join(words.split()).rstrip(".! ")
    return words if 0 < len(words) <= MAX_ACTION_CHARS else None

"""How a pool gets the join strings that it hands to the machines it starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

Invite = Callable[[str], Awaitable[str]]
"""Machine id → join string for one worker on it, which no second worker can use."""

"""How a machine's worker gets into the run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

Invite = Callable[[str], Awaitable[str]]
"""Machine id → join string for one worker on it, which no second worker can use."""

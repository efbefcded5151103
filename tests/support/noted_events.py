from __future__ import annotations

from typing import Any


class NotedEvents:
    """An event log that is looked at."""

    def __init__(self) -> None:
        self.noted: list[tuple[str, dict[str, Any]]] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.noted.append((kind, fields))

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.noted]

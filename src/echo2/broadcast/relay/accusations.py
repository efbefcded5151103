"""Peers that did wrong here.

Invariant: an accusation is told for a while and then forgotten, so that who does wrong again later is accused again;
one that turned out unfair is withdrawn. Pure.
"""

from __future__ import annotations

TOLD_S = 600.0


class Accusations:
    def __init__(self) -> None:
        self._at: dict[str, float] = {}

    def add(self, peer: str, now: float) -> None:
        self._at.setdefault(peer, now)

    def withdraw(self, peer: str) -> None:
        self._at.pop(peer, None)

    def peers(self, now: float) -> list[str]:
        """The newest first."""
        self._at = {peer: since for peer, since in self._at.items() if now - since < TOLD_S}
        return sorted(self._at, key=lambda peer: (-self._at[peer], peer))

"""Whose returns a game is measured against (paper, Appendix D: group normalisation with a pluggable key).

Invariant: games of one key are comparable: by luck (the same deal), by start (similar cards), or only by task (batch).
"""

from __future__ import annotations

from typing import Literal

from echo2.data.sandbox.log import GameLog

Normalise = Literal["deal", "similar", "batch"]


def normalisation_key(log: GameLog, normalise: Normalise) -> str:
    """A record's ``normalisation_key``. Example, ``similar``: ``poker/strong/button/rock``."""
    others = "+".join(sorted(name for seat, name in enumerate(log.players) if seat != log.seat))
    match normalise:
        case "deal":
            return f"{log.sandbox}/{log.seed}/{log.seat}/{others}"
        case "similar":
            return f"{log.sandbox}/{log.likeness}/{others}"
        case "batch":
            return log.sandbox

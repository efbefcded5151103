from __future__ import annotations

from snapshots import snapshot_of

__all__ = ["snapshot_of"]

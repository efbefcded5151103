from __future__ import annotations

from snapshots import small_disk, snapshot_of

__all__ = ["small_disk", "snapshot_of"]

from __future__ import annotations

from snapshots import full_disk, small_disk, snapshot_of

__all__ = ["full_disk", "small_disk", "snapshot_of"]

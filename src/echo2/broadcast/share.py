"""How much of a snapshot a delta changes.

Invariant: only what a delta's records say is counted; the base is not needed. For people: nothing depends on it.
"""

from __future__ import annotations

from pathlib import Path

from echo2.broadcast.body import contents_of
from echo2.broadcast.delta import MAGIC, SEGMENT_BYTES
from echo2.broadcast.layout import segments_of
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.planes import shapes_of
from echo2.broadcast.wire import ObjectReader


def changed_share(manifest: Manifest, path: Path) -> float:
    """Share, 0 to 1, of the elements that differ from the base. Raises IntegrityError for a broken object."""
    changed = elements = 0
    with ObjectReader(path, manifest.object_size, MAGIC) as reader:
        for segment in segments_of(shapes_of(contents_of(manifest)), SEGMENT_BYTES):
            # One byte per changed element is the second stream of a record (``changes.Changes.small``).
            changed += len(reader.record([segment.elements, segment.elements, segment.nbytes])[1])
            elements += segment.elements
    return changed / elements if elements else 0.0

"""What relays are for: everybody has the object before all could have had it from the learner, faults included."""

from __future__ import annotations

import pytest
from virtual_relays import CHUNK_BYTES, Relays, object_manifest

from echo2.broadcast.plan.model import SEED

CHAIN = ("a", "b", "c", "d")
MANIFEST = object_manifest(400)


@pytest.mark.parametrize("fault", ["none", "dies after 40 %", "flips a bit of each chunk"])
def test_e09_a_failing_parent_leaves_the_broadcast_faster_than_a_direct_download(fault: str) -> None:
    """The learner's line is as fast as a worker's, so downloads from it follow one another: n take n·G/r.

    Links here do not share the seed's line; what the seed sent, at that line's rate, is the time it would have taken.
    """
    relays = Relays(CHAIN)
    relays.run(2.0)
    single_s = len(MANIFEST.chunks) * CHUNK_BYTES / relays.rate
    before_s = 0.4 * single_s
    if fault == "flips a bit of each chunk":
        relays.corrupt.add("a")
    relays.publish_chain(MANIFEST, CHAIN)
    relays.run(before_s)
    if fault == "dies after 40 %":
        relays.kill("a")
    living = [name for name in CHAIN if name not in relays.dead]
    took_s = before_s + relays.run_until_whole(MANIFEST.object_root, living, 60.0)
    uplink_s = relays.nodes[SEED].report().sent_bytes / relays.rate
    direct_s = len(living) * single_s
    assert max(took_s, uplink_s) < 0.75 * direct_s
    assert took_s < single_s + 1.5

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from adapted import AdaptedRun
from snapshots import FullDisk, SmallDisk, WriteSnapshot, bytes_in

from echo2.broadcast.catalogue import cheapest_path
from echo2.broadcast.delta import write_delta
from echo2.broadcast.disk_shelf import DiskShelf
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.planes import write_anchor
from echo2.broadcast.shelf import Published
from echo2.broadcast.signing import generate_key, open_signed, public_key
from echo2.broadcast.snapshot import RawTensor, load_manifest, verify_snapshot, write_snapshot
from echo2.broadcast.unpack import unpack
from echo2.errors import DiskFull, IntegrityError, Malformed, Refused
from echo2.transport.partial import OBJECT_NAME, object_is_whole
from echo2.types import Policy, SnapshotKind

KEY = generate_key()


class Learner:
    """Snapshots of a policy that drifts, and the deltas between them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bits = np.random.default_rng(0).integers(0, 1 << 16, 40_000).astype(np.uint16)

    def snapshot(self, version: int, incarnation: int = 0) -> tuple[Manifest, Path]:
        self._bits = self._bits.copy()
        self._bits[version::97] ^= 1
        policy = Policy(incarnation, version)
        folder = self._folder / str(policy)
        tensors = {"w": RawTensor.of(self._bits, "BF16")}
        manifest = write_snapshot(tensors, {}, run_id="run", policy=policy, dtype="bfloat16", folder=folder)
        return manifest, folder / OBJECT_NAME

    def delta(self, base: int, new: int) -> tuple[Manifest, Path]:
        out = self._folder / f"{base}-{new}"
        manifest = write_delta(self._folder / f"0.{base}", self._folder / f"0.{new}", out)
        assert manifest is not None
        return manifest, out


@pytest.fixture
def learner(tmp_path: Path) -> Learner:
    return Learner(tmp_path / "learner")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run" / "snapshots"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def object_of(folder: Path) -> bytes:
    return (folder / OBJECT_NAME).read_bytes()


async def publish(shelf: DiskShelf, manifest: Manifest, path: Path) -> Published:
    start, data = await shelf.offer(manifest), path.read_bytes()
    assert start is not None
    if start < len(data):
        await shelf.write(manifest.object_root, start, data[start:])
    return await shelf.finish(manifest.policy, manifest.object_root)


async def publish_three(shelf: DiskShelf, learner: Learner) -> None:
    """Version 0 as a whole, versions 2 and 4 as deltas."""
    await publish(shelf, *learner.snapshot(0))
    for version in (2, 4):
        learner.snapshot(version)
        await publish(shelf, *learner.delta(version - 2, version))


def told(shelf: DiskShelf) -> list[str]:
    return [f"{entry.policy} {entry.kind.value}" for entry in shelf.catalogue()]


async def test_a_whole_snapshot_is_published_as_a_signed_anchor_that_decodes_to_it(
    learner: Learner, folder: Path, tmp_path: Path
) -> None:
    shelf = DiskShelf(folder, KEY)
    manifest, path = learner.snapshot(0)
    published = await publish(shelf, manifest, path)
    assert published.raw_bytes == manifest.object_size
    for life in (shelf, DiskShelf(folder, KEY)):
        assert life.catalogue() == [published.entry]
        signed, served = life.signed(published.entry.root), life.object_path(published.entry.root)
        assert signed is not None
        assert served is not None
        anchor = open_signed(signed, public_key(KEY))
        assert (anchor.kind, anchor.decoded_root) == (SnapshotKind.ANCHOR, manifest.decoded_root)
        assert object_is_whole(served, anchor)
    assert unpack(anchor, served, None, tmp_path / "w") == manifest


async def test_a_delta_is_published_as_it_came_and_its_version_lies_whole_on_the_shelf(
    learner: Learner, folder: Path
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish(shelf, *learner.snapshot(0))
    whole, path = learner.snapshot(2)
    delta, sent = learner.delta(0, 2)
    published = await publish(shelf, delta, sent)
    assert (published.entry.kind, published.entry.size_bytes) == (SnapshotKind.DELTA, delta.object_size)
    assert published.raw_bytes == whole.object_size
    assert published.changed_share == pytest.approx(1 / 97, rel=0.01)
    for life in (shelf, DiskShelf(folder, KEY)):
        assert told(life) == ["0.0 anchor", "0.2 delta"]
        served = life.object_path(delta.object_root)
        assert served is not None
        assert served.read_bytes() == sent.read_bytes()
    assert load_manifest(folder / "0.2") == whole
    assert object_of(folder / "0.2") == path.read_bytes()
    verify_snapshot(folder / "0.2", whole)
    assert names_in(folder / "0.2") == [
        "delta", "delta.signed", "manifest.json", "model.safetensors", "signature",
    ]  # fmt: skip


async def test_a_delta_whose_base_is_not_here_is_asked_for_as_a_whole(learner: Learner, folder: Path) -> None:
    learner.snapshot(0)
    whole, path = learner.snapshot(2)
    shelf = DiskShelf(folder, KEY)
    assert await shelf.offer(learner.delta(0, 2)[0]) is None
    assert (await publish(shelf, whole, path)).entry.kind is SnapshotKind.ANCHOR
    assert names_in(folder) == ["0.2"]


async def test_a_delta_that_does_not_become_what_it_says_is_not_published_and_the_whole_one_is_taken(
    learner: Learner, folder: Path
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish(shelf, *learner.snapshot(0))
    whole, path = learner.snapshot(2)
    delta, sent = learner.delta(0, 2)
    served = folder / "0.0" / OBJECT_NAME
    damaged = bytearray(served.read_bytes())
    damaged[-1] ^= 1  # the coordinator's disk lost a bit of the base
    served.write_bytes(damaged)
    with pytest.raises(IntegrityError, match="did not become what the manifest says"):
        await publish(shelf, delta, sent)
    assert told(shelf) == ["0.0 anchor"]
    await publish(shelf, whole, path)
    assert told(shelf) == ["0.0 anchor", "0.2 anchor"]
    assert names_in(folder) == ["0.0", "0.2"]


async def test_an_upload_goes_on_where_it_stopped_even_over_a_restart_in_mid_chunk(
    snapshot_of: WriteSnapshot, folder: Path
) -> None:
    manifest, written = snapshot_of()
    data, root = object_of(written), manifest.object_root
    shelf = DiskShelf(folder, KEY)
    assert await shelf.offer(manifest) == 0
    assert await shelf.write(root, 0, data[:2048]) == 2048
    shelf.close()
    with (folder / "0.4.partial" / OBJECT_NAME).open("r+b") as file:
        file.seek(2048)
        file.write(b"half a chunk, then kill -9")
    later = DiskShelf(folder, KEY)
    assert later.catalogue() == []
    assert await later.write(root, 2048, data[2048:4096]) == 4096  # no new offer is needed
    assert await later.offer(manifest) == 4096
    await later.write(root, 4096, data[4096:])
    await later.finish(manifest.policy, root)
    assert await later.offer(manifest) == manifest.object_size
    assert names_in(folder) == ["0.4"]


async def test_a_piece_sent_twice_is_confirmed_and_a_gap_is_refused(snapshot_of: WriteSnapshot, folder: Path) -> None:
    manifest, written = snapshot_of()
    data, root = object_of(written), manifest.object_root
    shelf = DiskShelf(folder, KEY)
    with pytest.raises(Refused, match="offer it first"):
        await shelf.write(root, 0, data[:1024])
    await shelf.offer(manifest)
    assert await shelf.write(root, 0, data[:1024]) == 1024
    assert await shelf.write(root, 0, data[:1024]) == 1024
    with pytest.raises(Refused, match="must begin at 1024, got 2048"):
        await shelf.write(root, 2048, data[2048:3072])
    with pytest.raises(Malformed, match="whole chunks"):
        await shelf.write(root, 1024, data[1024:1500])
    with pytest.raises(Malformed, match="end within"):
        await shelf.write(root, 1024, data[1024:] + bytes(10))
    shelf.close()


async def test_a_wrong_chunk_is_not_kept(snapshot_of: WriteSnapshot, folder: Path) -> None:
    manifest, written = snapshot_of()
    shelf = DiskShelf(folder, KEY)
    await shelf.offer(manifest)
    with pytest.raises(IntegrityError, match="chunk 1 is not what the manifest says"):
        await shelf.write(manifest.object_root, 0, object_of(written)[:1024] + bytes(1024))
    assert await shelf.offer(manifest) == 1024
    await publish(shelf, manifest, written / OBJECT_NAME)


async def test_an_incomplete_upload_cannot_be_published(snapshot_of: WriteSnapshot, folder: Path) -> None:
    manifest, written = snapshot_of()
    shelf = DiskShelf(folder, KEY)
    await shelf.offer(manifest)
    await shelf.write(manifest.object_root, 0, object_of(written)[:1024])
    with pytest.raises(Refused, match="upload the rest"):
        await shelf.finish(manifest.policy, manifest.object_root)
    with pytest.raises(Refused, match=r"is of 0\.4, not of 0\.5"):
        await shelf.finish(Policy(0, 5), manifest.object_root)
    assert shelf.catalogue() == []
    assert shelf.object_path(manifest.object_root) is None
    shelf.close()


async def test_publishing_again_changes_nothing_and_other_weights_are_refused(
    snapshot_of: WriteSnapshot, folder: Path
) -> None:
    manifest, written = snapshot_of()
    other, _ = snapshot_of(elements=10, name="other")
    shelf = DiskShelf(folder, KEY)
    published = await publish(shelf, manifest, written / OBJECT_NAME)
    assert await shelf.finish(manifest.policy, manifest.object_root) == published
    with pytest.raises(Refused, match="a version never changes"):
        await shelf.offer(other)


async def test_a_version_offered_again_in_another_form_is_the_same_version(learner: Learner, folder: Path) -> None:
    """A learner that crashed after its publish has lost the delta, or makes it anew."""
    shelf = DiskShelf(folder, KEY)
    await publish(shelf, *learner.snapshot(0))
    whole, _ = learner.snapshot(2)
    delta, sent = learner.delta(0, 2)
    published = await publish(shelf, delta, sent)
    assert await shelf.offer(whole) == whole.object_size
    assert await shelf.finish(whole.policy, whole.object_root) == published


async def test_a_replayed_unpublished_version_with_other_weights_starts_over(
    snapshot_of: WriteSnapshot, folder: Path
) -> None:
    manifest, written = snapshot_of()
    other, rewritten = snapshot_of(elements=2900, name="other")
    shelf = DiskShelf(folder, KEY)
    await shelf.offer(manifest)
    await shelf.write(manifest.object_root, 0, object_of(written))
    assert await shelf.offer(other) == 0
    published = await publish(shelf, other, rewritten / OBJECT_NAME)
    assert published.entry.decoded_root == other.decoded_root


# ---- anchors ---------------------------------------------------------------------------------------------------


async def test_an_anchor_is_added_beside_the_delta_and_only_once(
    learner: Learner, folder: Path, tmp_path: Path
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish_three(shelf, learner)
    root = await shelf.add_anchor(Policy(0, 4))
    assert root is not None
    assert await shelf.add_anchor(Policy(0, 4)) == root
    assert await shelf.add_anchor(Policy(0, 9)) is None
    for life in (shelf, DiskShelf(folder, KEY)):
        assert told(life) == ["0.0 anchor", "0.2 delta", "0.4 delta", "0.4 anchor"]
    signed, path = shelf.signed(root), shelf.object_path(root)
    assert signed is not None
    assert path is not None
    raw = unpack(open_signed(signed, public_key(KEY)), path, None, tmp_path / "w")
    assert raw == load_manifest(folder / "0.4")


class Held(NamedTuple):
    """An encoding that has begun and waits."""

    began: threading.Event
    go_on: threading.Event


@pytest.fixture
def slow_anchor(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Held]:
    def hold() -> Held:
        held = Held(threading.Event(), threading.Event())

        def write(folder: Path, out: Path) -> Manifest:
            held.began.set()
            assert held.go_on.wait(20)
            return write_anchor(folder, out)

        monkeypatch.setattr("echo2.broadcast.disk_shelf.write_anchor", write)
        return held

    return hold


async def test_while_an_anchor_is_encoded_versions_are_published_and_its_own_is_not_pruned(
    learner: Learner, folder: Path, slow_anchor: Callable[[], Held]
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish_three(shelf, learner)
    held = slow_anchor()
    encoding = asyncio.create_task(shelf.add_anchor(Policy(0, 4)))
    await asyncio.to_thread(held.began.wait, 20)
    learner.snapshot(6)
    await publish(shelf, *learner.delta(4, 6))
    await shelf.prune({Policy(0, 6)}, set(), set())
    held.go_on.set()
    assert await encoding is not None
    assert "0.4 anchor" in told(shelf)
    await shelf.prune({Policy(0, 6)}, set(), set())
    assert told(shelf) == ["0.4 anchor", "0.6 delta"]


async def test_an_encoding_that_was_interrupted_leaves_nothing_behind(learner: Learner, folder: Path) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish_three(shelf, learner)
    (folder / "0.4" / "anchor.aside").write_bytes(b"half of an")
    (folder / "0.2" / "anchor").write_bytes(b"whole, but not signed yet")
    later = DiskShelf(folder, KEY)
    assert told(later) == ["0.0 anchor", "0.2 delta", "0.4 delta"]
    assert not {"anchor", "anchor.aside"} & {*names_in(folder / "0.4"), *names_in(folder / "0.2")}
    assert await later.add_anchor(Policy(0, 4)) is not None


# ---- pruning, restarts, full disks -----------------------------------------------------------------------------


async def test_pruned_are_old_weights_and_objects_before_the_newest_anchor(learner: Learner, folder: Path) -> None:
    """PROTOCOL §1: what stays is the newest anchor, the deltas after it, and what is named."""
    shelf = DiskShelf(folder, KEY)
    await publish_three(shelf, learner)
    assert await shelf.prune({Policy(0, 4)}, set(), set()) == ()
    for life in (shelf, DiskShelf(folder, KEY)):
        assert told(life) == ["0.0 anchor", "0.2 delta", "0.4 delta"]
    assert [OBJECT_NAME in names_in(folder / name) for name in ("0.0", "0.2", "0.4")] == [False, False, True]
    assert await shelf.add_anchor(Policy(0, 2)) is None, "its weights are gone"
    before = {entry.root for entry in shelf.catalogue()}
    anchor = await shelf.add_anchor(Policy(0, 4))
    gone = await shelf.prune({Policy(0, 4)}, set(), set())
    assert set(gone) == before - {entry.root for entry in shelf.catalogue()}
    assert anchor not in gone
    assert names_in(folder) == ["0.4"]


async def test_e05_pruning_keeps_what_is_being_read_and_what_is_being_uploaded(learner: Learner, folder: Path) -> None:
    shelf = DiskShelf(folder, KEY)
    first = await publish(shelf, *learner.snapshot(1))
    await publish(shelf, *learner.snapshot(2))
    await shelf.offer(learner.snapshot(3)[0])
    path = shelf.object_path(first.entry.root)
    assert path is not None
    data = path.read_bytes()
    with path.open("rb") as reader:
        assert await shelf.prune({Policy(0, 2)}, set(), set()) == (first.entry.root,)
        assert reader.read() == data
    assert shelf.object_path(first.entry.root) is None
    assert names_in(folder) == ["0.2", "0.3.partial"]
    shelf.close()


async def test_e05_only_whole_objects_are_ever_seen_while_others_are_published_and_pruned(
    learner: Learner, folder: Path
) -> None:
    shelf = DiskShelf(folder, KEY)
    seen: set[Policy] = set()

    async def read_newest() -> None:
        while Policy(0, 11) not in seen:
            for entry in shelf.catalogue()[-1:]:
                signed, path = shelf.signed(entry.root), shelf.object_path(entry.root)
                assert signed is not None
                assert path is not None
                # Pruned between listing and opening is no fault: the file is gone then, never a part of one.
                whole = await asyncio.to_thread(object_is_whole, path, open_signed(signed, public_key(KEY)))
                assert whole or not path.exists()
                seen.add(entry.policy)
            await asyncio.sleep(0)

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        group.create_task(read_newest())
        for version in range(12):
            manifest, path = learner.snapshot(version)
            await publish(shelf, manifest, path)
            await shelf.prune({manifest.policy}, set(), set())


@pytest.mark.parametrize("part", ["payload", "decoding", "signing"])
@pytest.mark.parametrize("kind", ["delta", "whole"])
async def test_e07_a_full_disk_keeps_the_published_version_and_the_upload(
    learner: Learner, folder: Path, full_disk: FullDisk, kind: str, part: str
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish(shelf, *learner.snapshot(0))
    whole = learner.snapshot(2)
    new, path = learner.delta(0, 2) if kind == "delta" else whole
    data, root = path.read_bytes(), new.object_root
    await shelf.offer(new)
    if part == "payload":
        with full_disk(len(data) // 2), pytest.raises(DiskFull):
            await shelf.write(root, 0, data)
    else:
        await shelf.write(root, 0, data)
        room = 10_000 if part == "decoding" else whole[0].object_size + 400
        with full_disk(room), pytest.raises(DiskFull):
            await shelf.finish(new.policy, root)
        assert await shelf.offer(new) == new.object_size, "the upload need not be repeated"
    shelf.close()
    for life in (shelf, DiskShelf(folder, KEY)):
        assert told(life) == ["0.0 anchor"]
    await publish(shelf, new, path)
    assert names_in(folder) == ["0.0", "0.2"]


@pytest.mark.parametrize("kind", ["delta", "whole"])
async def test_e07_a_version_whose_signature_finds_no_room_leaves_only_its_upload(
    learner: Learner, folder: Path, small_disk: SmallDisk, kind: str
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish(shelf, *learner.snapshot(0))
    whole = learner.snapshot(2)
    new, path = learner.delta(0, 2) if kind == "delta" else whole
    await shelf.offer(new)
    await shelf.write(new.object_root, 0, path.read_bytes())
    anchor = write_anchor(whole[1].parent, folder.parent / "trial")
    made_bytes = (whole[0] if kind == "delta" else anchor).object_size
    before, uploaded = bytes_in(folder), names_in(folder / "0.2.partial")
    described_bytes = 80 + len(encode_manifest(whole[0]))  # all but the last signature fits
    with small_disk(folder, before + made_bytes + described_bytes), pytest.raises(DiskFull):
        await shelf.finish(new.policy, new.object_root)
    assert (bytes_in(folder), names_in(folder / "0.2.partial")) == (before, uploaded)
    with small_disk(folder, before + made_bytes + 10_000):
        await shelf.finish(new.policy, new.object_root)
    assert names_in(folder) == ["0.0", "0.2"]


@pytest.mark.parametrize("kind", ["delta", "whole"])
async def test_e07_what_a_killed_coordinator_made_of_an_upload_is_removed_before_it_is_made_again(
    learner: Learner, folder: Path, small_disk: SmallDisk, kind: str
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish(shelf, *learner.snapshot(0))
    whole = learner.snapshot(2)
    new, path = learner.delta(0, 2) if kind == "delta" else whole
    await shelf.offer(new)
    await shelf.write(new.object_root, 0, path.read_bytes())
    room = bytes_in(folder) + whole[0].object_size + 10_000
    left = "model.safetensors" if kind == "delta" else "anchor"
    (folder / "0.2.partial" / left).write_bytes(bytes(whole[0].object_size))
    with small_disk(folder, room):
        await shelf.finish(new.policy, new.object_root)
    assert told(shelf)[-1].startswith("0.2 ")


async def test_e07_an_anchor_whose_signature_finds_no_room_is_not_left(
    learner: Learner, folder: Path, tmp_path: Path, small_disk: SmallDisk
) -> None:
    shelf = DiskShelf(folder, KEY)
    await publish_three(shelf, learner)
    anchor_bytes, before = write_anchor(folder / "0.4", tmp_path / "trial").object_size, bytes_in(folder)
    with small_disk(folder, before + anchor_bytes + 50), pytest.raises(DiskFull):
        await shelf.add_anchor(Policy(0, 4))
    assert bytes_in(folder) == before
    with small_disk(folder, before + anchor_bytes + 10_000):
        assert await shelf.add_anchor(Policy(0, 4)) is not None


async def test_e09_a_newcomer_and_a_holder_bring_fewer_bytes_than_the_file_that_the_learner_has(
    folder: Path, tmp_path: Path
) -> None:
    """On one line fewer bytes are less time: both are there below a direct download, whoever sends them."""
    shelf, random = DiskShelf(folder, KEY), np.random.default_rng(0)
    bits = (random.standard_normal(200_000, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for version in (0, 2, 4):
        bits = bits + (random.random(len(bits)) < 0.03).astype(np.uint16)
        made, policy = tmp_path / f"0.{version}", Policy(0, version)
        tensors = {"w": RawTensor.of(bits, "BF16")}
        whole = write_snapshot(tensors, {}, run_id="run", policy=policy, dtype="bfloat16", folder=made)
        delta = write_delta(tmp_path / f"0.{version - 2}", made, tmp_path / "d") if version else None
        await publish(shelf, *((whole, made / OBJECT_NAME) if delta is None else (delta, tmp_path / "d")))
    ways = [cheapest_path(shelf.catalogue(), whole.policy, held) for held in ((), (Policy(0, 0),))]
    newcomer, holder = (sum(entry.size_bytes for entry in way or ()) for way in ways)
    assert 0 < holder < 0.2 * whole.object_size
    assert holder < newcomer < 0.85 * whole.object_size


async def test_a_version_that_lost_a_file_is_told_and_not_served(learner: Learner, folder: Path) -> None:
    await publish_three(DiskShelf(folder, KEY), learner)
    os.truncate(folder / "0.2" / "delta", 10)
    with pytest.raises(IntegrityError, match=r"0\.2 cannot be served: delta must have \d+ bytes, got 10; move it away"):
        DiskShelf(folder, KEY)
    (folder / "0.2" / "delta").unlink()
    with pytest.raises(IntegrityError, match=r"0\.2 cannot be served"):
        DiskShelf(folder, KEY)


async def test_parts_of_two_versions_are_no_version(learner: Learner, folder: Path) -> None:
    await publish_three(DiskShelf(folder, KEY), learner)
    for name in ("delta", "delta.signed"):
        os.replace(folder / "0.2" / name, folder / "0.4" / name)
    with pytest.raises(IntegrityError, match=r"0\.4 cannot be served: its parts are not all of version 0\.4"):
        DiskShelf(folder, KEY)


def test_a_version_signed_by_another_run_is_not_served(snapshot_of: WriteSnapshot, folder: Path) -> None:
    shelf = DiskShelf(folder, KEY)
    manifest, written = snapshot_of()
    asyncio.run(publish(shelf, manifest, written / OBJECT_NAME))
    with pytest.raises(IntegrityError, match=r"0\.4 cannot be served"):
        DiskShelf(folder, generate_key())


async def test_of_a_run_with_adapters_the_base_and_the_newest_stay(folder: Path, tmp_path: Path) -> None:
    run, shelf = AdaptedRun(tmp_path / "learner"), DiskShelf(folder, KEY)
    await run.version(0)
    await publish(shelf, load_manifest(run.raw(0)), run.raw(0) / OBJECT_NAME)
    for version in (2, 4, 6):
        manifest, path = await run.version(version)
        published = await publish(shelf, manifest, path)
        assert published.changed_share is None, "nobody counted it"
        assert object_of(folder / f"0.{version}") == object_of(run.raw(version))
        await shelf.prune({Policy(0, version)}, set(), set())
    for life in (shelf, DiskShelf(folder, KEY)):
        assert told(life) == ["0.0 anchor", "0.6 delta"]
    assert [OBJECT_NAME in names_in(folder / name) for name in names_in(folder)] == [True, True]
    manifest, path = await run.version(8)
    await publish(DiskShelf(folder, KEY), manifest, path)


async def test_adapters_that_are_not_those_of_the_manifest_are_not_published(folder: Path, tmp_path: Path) -> None:
    run, shelf = AdaptedRun(tmp_path / "learner"), DiskShelf(folder, KEY)
    await run.version(0)
    await publish(shelf, load_manifest(run.raw(0)), run.raw(0) / OBJECT_NAME)
    manifest, path = await run.version(2)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(IntegrityError, match="chunk"):
        await publish(shelf, manifest, path)
    assert told(shelf) == ["0.0 anchor"]

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from adapted import AdaptedRun
from snapshots import SmallDisk, bytes_in

from echo2.broadcast.delta import write_delta
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.planes import write_anchor
from echo2.broadcast.signing import encode_signed, generate_key, public_key, sign
from echo2.broadcast.snapshot import RawTensor, load_manifest, verify_snapshot, write_snapshot
from echo2.errors import DiskFull, IntegrityError
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy
from echo2.worker.installer import SnapshotTerms
from echo2.worker.stock import DiskStock

KEY = generate_key()
TERMS = SnapshotTerms("run", public_key(KEY), "bfloat16")
Object = tuple[bytes, Manifest, Path]


async def unheard(roots: tuple[str, ...]) -> None: ...


class Published:
    """Objects of versions 0, 2, 4 … as they reach a worker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        bits = np.random.default_rng(0).integers(0, 1 << 16, 30_000).astype(np.uint16)
        for version in (0, 2, 4, 6):
            bits = bits.copy()
            bits[version::101] += 1
            write_snapshot(
                {"w": RawTensor.of(bits, "BF16")}, {"head": "w"}, run_id="run", policy=Policy(0, version),
                dtype="bfloat16", folder=folder / f"0.{version}",
            )  # fmt: skip

    def anchor(self, version: int, key: bytes = KEY) -> Object:
        out = self.folder / f"anchor-{version}"
        return self._signed(write_anchor(self.folder / f"0.{version}", out), out, key)

    def delta(self, base: int, version: int) -> Object:
        out = self.folder / f"delta-{version}"
        made = write_delta(self.folder / f"0.{base}", self.folder / f"0.{version}", out)
        assert made is not None
        return self._signed(made, out, KEY)

    @staticmethod
    def _signed(manifest: Manifest, out: Path, key: bytes) -> Object:
        return encode_signed(sign(encode_manifest(manifest), key)), manifest, out


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path / "learner")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


async def stocked(folder: Path, *objects: Object) -> DiskStock:
    stock = DiskStock(folder, TERMS, unheard)
    for item in objects:
        await stock.build(*item)
    return stock


async def test_i6_an_anchor_and_the_deltas_after_it_become_the_published_bytes(
    published: Published, folder: Path
) -> None:
    stock = await stocked(folder, published.anchor(0), published.delta(0, 2), published.delta(2, 4))
    assert stock.held() == (Policy(0, 0), Policy(0, 2), Policy(0, 4))
    for policy in stock.held():
        original = published.folder / str(policy)
        assert load_manifest(stock.folder(policy)) == load_manifest(original)
        assert (stock.folder(policy) / OBJECT_NAME).read_bytes() == (original / OBJECT_NAME).read_bytes()


async def test_a_delta_without_its_base_changes_nothing(published: Published, folder: Path) -> None:
    stock = await stocked(folder, published.anchor(0))
    with pytest.raises(IntegrityError, match=r"applies to 0\.2, which is not held here"):
        await stock.build(*published.delta(2, 4))
    assert stock.held() == (Policy(0, 0),)


async def test_a_damaged_object_leaves_what_was_held(published: Published, folder: Path) -> None:
    stock = await stocked(folder, published.anchor(0))
    signed, manifest, path = published.delta(0, 2)
    data = bytearray(path.read_bytes())
    data[-3] ^= 255
    path.write_bytes(data)
    with pytest.raises(IntegrityError):
        await stock.build(signed, manifest, path)
    assert stock.held() == (Policy(0, 0),)
    assert [entry.name for entry in folder.iterdir()] == ["0.0"]


async def test_a_restarted_worker_holds_what_it_verified_again_and_can_build_on_it(
    published: Published, folder: Path
) -> None:
    await stocked(folder, published.anchor(0), published.delta(0, 2))
    told: list[tuple[str, ...]] = []

    async def tell(roots: tuple[str, ...]) -> None:
        told.append(roots)

    later = DiskStock(folder, TERMS, tell)
    assert later.held() == ()
    await later.recover()
    assert later.held() == (Policy(0, 0), Policy(0, 2))
    assert told == [tuple(load_manifest(folder / name).decoded_root for name in ("0.0", "0.2"))]
    await later.build(*published.delta(2, 4))
    assert later.held()[-1] == Policy(0, 4)


async def test_what_an_earlier_life_left_in_pieces_damaged_or_foreign_is_not_held(
    published: Published, folder: Path
) -> None:
    await stocked(folder, published.anchor(0), published.anchor(2), published.anchor(4), published.anchor(6))
    (folder / "0.0" / "signed").unlink()  # died before the last file
    data = bytearray((folder / "0.2" / OBJECT_NAME).read_bytes())
    data[-1] ^= 1
    (folder / "0.2" / OBJECT_NAME).write_bytes(data)
    (folder / "0.4" / "signed").write_bytes(published.anchor(4, generate_key())[0])
    (folder / "0.8.unpacked.aside").mkdir()
    (folder / "0.6").rename(folder / "0.7")
    later = DiskStock(folder, TERMS, unheard)
    await later.recover()
    assert later.held() == ()
    assert list(folder.iterdir()) == []


async def test_only_the_newest_snapshots_and_the_installed_one_stay(published: Published, folder: Path) -> None:
    stock = await stocked(
        folder, published.anchor(0), published.delta(0, 2), published.delta(2, 4), published.delta(4, 6)
    )
    await stock.tidy(Policy(0, 0))
    assert stock.held() == (Policy(0, 0), Policy(0, 4), Policy(0, 6))
    await stock.tidy(Policy(0, 6))
    assert stock.held() == (Policy(0, 4), Policy(0, 6))
    assert sorted(path.name for path in folder.iterdir()) == ["0.4", "0.6"]
    verify_snapshot(stock.folder(Policy(0, 6)), load_manifest(stock.folder(Policy(0, 6))))


@pytest.mark.parametrize("kind", ["anchor", "delta"])
async def test_e07_weights_whose_signed_manifest_finds_no_room_are_not_left_where_the_next_try_needs_it(
    published: Published, folder: Path, tmp_path: Path, small_disk: SmallDisk, kind: str
) -> None:
    built = [published.anchor(0)] + ([published.delta(0, 2)] if kind == "delta" else [])
    await stocked(tmp_path / "trial", *built)
    enough = bytes_in(tmp_path / "trial")
    stock = await stocked(folder, *built[:-1])
    before, held = sorted(folder.rglob("*")), stock.held()
    with small_disk(folder, enough - 1), pytest.raises(DiskFull):
        await stock.build(*built[-1])
    assert (sorted(folder.rglob("*")), stock.held()) == (before, held)
    with small_disk(folder, enough):
        await stock.build(*built[-1])
    assert stock.held()[-1] == built[-1][1].policy


async def test_the_base_of_adapters_stays_with_the_newest_versions_also_over_a_restart(
    tmp_path: Path, folder: Path
) -> None:
    run, stock = AdaptedRun(tmp_path / "learner"), DiskStock(folder, TERMS, unheard)
    for version in (0, 2, 4, 6, 8):
        manifest, path = await run.version(version)
        await stock.build(encode_signed(sign(encode_manifest(manifest), KEY)), manifest, path)
        await stock.tidy(manifest.policy)
        built = stock.folder(manifest.policy) / OBJECT_NAME
        assert built.read_bytes() == (run.raw(version) / OBJECT_NAME).read_bytes()
    assert stock.held() == (Policy(0, 0), Policy(0, 6), Policy(0, 8))
    again = DiskStock(folder, TERMS, unheard)
    await again.recover()
    manifest, path = await run.version(10)
    await again.build(encode_signed(sign(encode_manifest(manifest), KEY)), manifest, path)
    await again.tidy(manifest.policy)
    assert again.held() == (Policy(0, 0), Policy(0, 8), Policy(0, 10))
    assert manifest.object_size < 0.1 * (run.raw(10) / OBJECT_NAME).stat().st_size

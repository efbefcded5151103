from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from echo2.broadcast.body import open_snapshot
from echo2.broadcast.delta import SEGMENT_BYTES, write_delta
from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import chunk_size_for, encode_manifest, parse_manifest
from echo2.broadcast.planes import estimated_bytes, write_anchor
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.broadcast.unpack import unpack
from echo2.errors import IntegrityError
from echo2.transport.partial import MANIFEST_NAME, OBJECT_NAME
from echo2.types import Policy, SnapshotKind

WIDTH = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "F32": 4,
    "I32": 4,
    "F64": 8,
    "I64": 8,
}
Tensors = dict[str, RawTensor]


def weights(seed: int, elements: int = 60_000) -> np.ndarray[tuple[int], np.dtype[np.uint16]]:
    """bfloat16 bits of N(0, 0.02)."""
    floats = np.random.default_rng(seed).standard_normal(elements, np.float32) * np.float32(0.02)
    return (floats.view(np.uint32) >> 16).astype(np.uint16)


def stepped(bits: np.ndarray[tuple[int], np.dtype[np.uint16]], share: float, seed: int = 1) -> RawTensor:
    random = np.random.default_rng(seed)
    return RawTensor.of(bits + (random.random(len(bits)) < share).astype(np.uint16), "BF16")


def write(folder: Path, tensors: Tensors, version: int, dtype: str = "mixed") -> Manifest:
    return write_snapshot(tensors, {}, run_id="run", policy=Policy(0, version), dtype=dtype, folder=folder)


@st.composite
def tensor_pairs(draw: st.DrawFn) -> tuple[RawTensor, RawTensor]:
    dtype = draw(st.sampled_from(sorted(WIDTH)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    length = int(np.prod(shape)) * WIDTH[dtype]
    base = draw(st.binary(min_size=length, max_size=length))
    new = base if draw(st.booleans()) else draw(st.binary(min_size=length, max_size=length))
    return RawTensor(dtype, shape, memoryview(base)), RawTensor(dtype, shape, memoryview(new))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6), tensor_pairs()))
def test_i6_a_delta_or_an_anchor_of_any_tensors_unpacks_to_the_very_snapshot(
    tmp_path: Path, pairs: dict[str, tuple[RawTensor, RawTensor]]
) -> None:
    # A large tensor of one value lets a delta pay off beside tensors of noise.
    ballast = {"": RawTensor("U8", (9000,), memoryview(bytes(range(250)) * 36))}
    ballast = {"ballast ballast": ballast[""]}
    write(tmp_path / "a", {n: b for n, (b, _) in pairs.items()} | ballast, 0)
    raw = write(tmp_path / "b", {n: new for n, (_, new) in pairs.items()} | ballast, 1)
    delta = write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    anchor = write_anchor(tmp_path / "b", tmp_path / "anchor")
    for manifest, file in ((delta, "delta"), (anchor, "anchor")):
        if manifest is not None:
            assert unpack(manifest, tmp_path / file, tmp_path / "a", tmp_path / "c") == raw
            for name in (OBJECT_NAME, MANIFEST_NAME):
                assert (tmp_path / "c" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_delta_of_one_percent_is_small_and_says_what_it_is(tmp_path: Path) -> None:
    bits = weights(0, 400_000)
    base = write(tmp_path / "a", {"w": RawTensor.of(bits, "BF16")}, 4, "bfloat16")
    new = write(tmp_path / "b", {"w": stepped(bits, 0.01)}, 6, "bfloat16")
    delta = write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    assert delta is not None
    assert delta.object_size == (tmp_path / "delta").stat().st_size < 0.008 * new.object_size
    assert (delta.kind, delta.codec, delta.base, delta.base_root) == (
        SnapshotKind.DELTA, "delta", Policy(0, 4), base.decoded_root,
    )  # fmt: skip
    assert (delta.policy, delta.decoded_root, delta.tensors) == (new.policy, new.decoded_root, new.tensors)
    assert delta.chunk_size == chunk_size_for(delta.object_size)
    assert parse_manifest(encode_manifest(delta)) == delta


def test_a_delta_larger_than_an_anchor_is_not_made(tmp_path: Path) -> None:
    write(tmp_path / "a", {"w": RawTensor.of(weights(0), "BF16")}, 0)
    write(tmp_path / "b", {"w": RawTensor.of(weights(1), "BF16")}, 1)
    assert write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_the_anchor_is_estimated_within_a_few_percent(tmp_path: Path) -> None:
    write(tmp_path / "a", {"w": RawTensor.of(weights(0), "BF16"), "f": RawTensor.of(np.ones(99, np.float32))}, 0)
    size = write_anchor(tmp_path / "a", tmp_path / "anchor").object_size
    assert abs(estimated_bytes(open_snapshot(tmp_path / "a")) / size - 1) < 0.05


OTHERS: dict[str, Callable[[Tensors], Tensors]] = {
    "added": lambda t: t | {"v": t["w"]},
    "removed": lambda t: {"b": t["b"]},
    "reshaped": lambda t: t | {"w": RawTensor("BF16", (2, 100), t["w"].data)},
    "of another type": lambda t: t | {"w": RawTensor("F16", (200,), t["w"].data)},
    "renamed": lambda t: {"b": t["b"], "x": t["w"]},
}


@pytest.mark.parametrize("change", OTHERS)
def test_tensors_that_were_changed_otherwise_than_in_value_have_no_delta(tmp_path: Path, change: str) -> None:
    tensors = {"w": RawTensor.of(weights(0, 200), "BF16"), "b": RawTensor.of(np.ones(3, np.int64))}
    write(tmp_path / "a", tensors, 0)
    write(tmp_path / "b", OTHERS[change](tensors), 1)
    assert write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta") is None


def test_a_base_that_is_not_older_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        write(tmp_path / name, {"w": RawTensor.of(weights(0, 200), "BF16")}, 1)
    with pytest.raises(IntegrityError, match="must be older"):
        write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta")


def test_tensors_across_segments_and_of_several_widths_come_back(tmp_path: Path) -> None:
    bits = weights(0, SEGMENT_BYTES // 2 + 1001)
    floats = np.linspace(-1, 1, 4097, dtype=np.float32)
    write(
        tmp_path / "a", {"w": RawTensor.of(bits, "BF16"), "f": RawTensor.of(floats), "e": RawTensor.of(floats[:0])}, 0
    )
    raw = write(
        tmp_path / "b",
        {"w": stepped(bits, 0.002), "f": RawTensor.of(floats * np.float32(1.000001)), "e": RawTensor.of(floats[:0])}, 1,
    )  # fmt: skip
    delta = write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    assert delta is not None
    assert unpack(delta, tmp_path / "delta", tmp_path / "a", tmp_path / "c") == raw


def test_views_with_strides_are_written_as_what_they_show(tmp_path: Path) -> None:
    grid = np.arange(600, dtype=np.int16).reshape(20, 30)
    write(tmp_path / "a", {"w": RawTensor.of(grid.T[::2])}, 0)
    raw = write(tmp_path / "b", {"w": RawTensor.of((grid + (grid == 31)).T[::2])}, 1)
    delta = write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta")
    assert delta is not None
    assert unpack(delta, tmp_path / "delta", tmp_path / "a", tmp_path / "c") == raw


def test_another_finder_of_changes_is_used(tmp_path: Path) -> None:
    write(tmp_path / "a", {"w": RawTensor.of(np.zeros(5000, np.uint8))}, 0)
    write(tmp_path / "b", {"w": RawTensor.of(np.ones(5000, np.uint8))}, 1)
    seen = []

    def none(base: object, new: object) -> tuple[bytes, bytes, bytes]:
        seen.append((base, new))
        return b"", b"", b""

    delta = write_delta(tmp_path / "a", tmp_path / "b", tmp_path / "delta", changes=none)
    assert len(seen) == 1
    assert delta is not None
    with pytest.raises(IntegrityError, match="tensor 'w' did not become"):
        unpack(delta, tmp_path / "delta", tmp_path / "a", tmp_path / "c")

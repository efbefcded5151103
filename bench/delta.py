"""How small deltas and anchors are, and what they cost a core. Prints one JSON object.

    python bench/delta.py [--mib 256] [--folder /tmp]

Speeds are gigabytes of the full snapshot per second of processor time, all threads together, best of several turns.
``memcpy`` and ``not_equal`` are measured beside them on the same arrays: on a busy machine, compare the ratios.

    encode_words / decode_words   arrays to compressed streams and back to positions and differences
    encode / decode               files to an object and back to the body's bytes, hashing and writing left out
    write / unpack                the whole way: manifest and object; raw folder, every hash checked, synced
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from echo2.broadcast.body import open_snapshot
from echo2.broadcast.changes import Changes, decode_changes, encode_changes
from echo2.broadcast.delta import MAGIC, SEGMENT_BYTES, decode_delta, write_delta
from echo2.broadcast.planes import MAGIC as PLANES_MAGIC
from echo2.broadcast.planes import decode_anchor, write_anchor
from echo2.broadcast.snapshot import RawTensor, write_snapshot
from echo2.broadcast.unpack import unpack
from echo2.broadcast.wire import ObjectReader, Packer
from echo2.types import Policy

TURNS = 5
TENSORS = 8
Bits = np.ndarray[Any, np.dtype[np.uint16]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="size of the snapshot")
    parser.add_argument("--folder", type=Path, default=None, help="where to put files")
    chosen = parser.parse_args()
    elements = chosen.mib * 1024 * 1024 // 2
    base = to_bfloat16(np.random.default_rng(0).standard_normal(elements, np.float32) * np.float32(0.02))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as folder:
        write(Path(folder) / "base", base, 0)
        results: dict[str, Any] = {"snapshot_bytes": base.nbytes} | baselines(base)
        results["cases"] = {
            name: measure(Path(folder), base, new)
            for name, new in {
                "adamw lr 1e-6, 1 step": adamw_step(base, 1e-6),
                **{f"{100 * share:g} %": changed(base, share) for share in (0.001, 0.01, 0.03, 0.1)},
            }.items()
        }
        results["anchor"] = measure_anchor(Path(folder), base)
    print(json.dumps(results, indent=1))


def to_bfloat16(values: np.ndarray[Any, np.dtype[np.float32]]) -> Bits:
    """Round to nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def adamw_step(base: Bits, lr: float) -> Bits:
    """One step on float32 masters spread evenly over the cells that round to ``base``, of Adam's update for noise.

    With momentum 0.9 and gradients that are noise, m / sqrt(v) is about N(0, 0.1 / 1.9).
    """
    random = np.random.default_rng(1)
    cells = (base.astype(np.uint32) << 16) + random.integers(-0x7FFF, 0x8000, len(base), np.int32).view(np.uint32)
    update = random.standard_normal(len(base), np.float32) * np.float32(np.sqrt(0.1 / 1.9))
    return to_bfloat16(cells.view(np.float32) - np.float32(lr) * update)


def changed(base: Bits, share: float) -> Bits:
    """``share`` of the elements moved: nine in ten by one unit in the last place, the rest by up to forty."""
    random = np.random.default_rng(2)
    places = np.flatnonzero(random.random(len(base)) < share)
    steps = random.choice(np.array([-1, 1], np.int32), len(places))
    far = random.random(len(places)) < 0.1
    steps[far] *= random.integers(2, 41, np.count_nonzero(far), np.int32)
    new = base.copy()
    new[places] += steps.astype(np.uint16)
    return new


def write(folder: Path, bits: Bits, version: int) -> None:
    tensors = {f"t{i}": RawTensor.of(part, "BF16") for i, part in enumerate(np.split(bits, TENSORS))}
    write_snapshot(tensors, {}, run_id="bench", policy=Policy(0, version), dtype="bfloat16", folder=folder)


def best_s(work: Callable[[], object], turns: int = TURNS) -> float:
    """Least processor time of a turn in seconds."""
    times = []
    for _ in range(turns):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def baselines(base: Bits) -> dict[str, float]:
    other, size = base.copy(), base.nbytes / 1e9
    step = SEGMENT_BYTES // base.itemsize
    words, others = base.view(np.uint64), other.view(np.uint64)

    def hashed() -> None:
        for start in range(0, len(base), step):
            blake3(base[start : start + step].data.cast("B"))

    return {
        "memcpy_gb_per_s": size / best_s(lambda: np.copyto(other, base)),
        "not_equal_gb_per_s": size / best_s(lambda: np.not_equal(words, others)),
        "blake3_gb_per_s": size / best_s(hashed),
    }


def measure(folder: Path, base: Bits, new: Bits) -> dict[str, float]:
    size = base.nbytes / 1e9
    step = SEGMENT_BYTES // base.itemsize
    packer = Packer()
    starts = range(0, len(base), step)

    def encode_words() -> list[tuple[Changes, bytes]]:
        found = [encode_changes(base[start : start + step], new[start : start + step]) for start in starts]
        return [(changes, packer.record(changes)) for changes in found]

    records = encode_words()

    def decode_words() -> None:
        for start, (changes, _) in zip(starts, records, strict=True):
            decode_changes(changes, len(base[start : start + step]), base.itemsize)

    write(folder / "new", new, 1)
    path = folder / "delta"
    manifest = write_delta(folder / "base", folder / "new", path)
    result = {
        "changed_percent": 100 * np.count_nonzero(base != new) / len(base),
        "encode_words_gb_per_s": size / best_s(encode_words),
        "decode_words_gb_per_s": size / best_s(decode_words),
    }
    if manifest is None:
        return result
    older = open_snapshot(folder / "base")

    def decode() -> None:
        with ObjectReader(path, manifest.object_size, MAGIC) as reader:
            for _ in decode_delta(reader, older.contents, older.body):
                pass

    with older.body:
        result |= {
            "size_percent": 100 * manifest.object_size / base.nbytes,
            "bits_per_change": 8 * manifest.object_size / np.count_nonzero(base != new),
            "decode_gb_per_s": size / best_s(decode),
        }
    return result | {
        "write_gb_per_s": size / best_s(lambda: write_delta(folder / "base", folder / "new", path), 3),
        "unpack_gb_per_s": size / best_s(lambda: unpack(manifest, path, folder / "base", folder / "made"), 3),
    }


def measure_anchor(folder: Path, base: Bits) -> dict[str, float]:
    size = base.nbytes / 1e9
    path = folder / "anchor"
    manifest = write_anchor(folder / "base", path)
    contents = open_snapshot(folder / "base").contents

    def decode() -> None:
        with ObjectReader(path, manifest.object_size, PLANES_MAGIC) as reader:
            for _ in decode_anchor(reader, contents):
                pass

    return {
        "size_percent": 100 * manifest.object_size / base.nbytes,
        "write_gb_per_s": size / best_s(lambda: write_anchor(folder / "base", path), 2),
        "decode_gb_per_s": size / best_s(decode, 2),
        "unpack_gb_per_s": size / best_s(lambda: unpack(manifest, path, None, folder / "made"), 2),
    }


if __name__ == "__main__":
    main()

"""A snapshot as the model directory that an inference server loads.

Invariant: a snapshot that does not fit the model that is served (other tensors, shapes or types) is refused before a
server hears of it; a directory that exists is complete, and stays so when the snapshot's own folder is gone.

The model's own files are put beside the weights, all but ``generation_config.json``: a server would take sampling
fields from it that nobody asked for (PROTOCOL §4).
"""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
from safetensors import SafetensorError, safe_open

from echo2.durable import remove_folder
from echo2.errors import EngineError
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy, SnapshotKind

MANIFEST_NAME = "manifest.json"
CONFIG_NAME = "config.json"
ADAPTER_NAME = "adapter_model.safetensors"
ADAPTER_CONFIG_NAME = "adapter_config.json"
LEFT_OUT = frozenset({"generation_config.json", MANIFEST_NAME, OBJECT_NAME, "model.safetensors.index.json"})
HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
"""Output layers: a loader that finds the input layer does not miss a tied one."""

Shapes = Mapping[str, tuple[str, tuple[int, ...]]]
"""name → (element type, shape)"""


class Checkpoint(msgspec.Struct, frozen=True):
    policy: Policy
    folder: Path
    is_adapter: bool
    """Only a LoRA adapter, in PEFT's files."""
    shapes: Shapes

    @property
    def weights(self) -> Path:
        return self.folder / (ADAPTER_NAME if self.is_adapter else OBJECT_NAME)

    def holds_what(self, other: Checkpoint) -> bool:
        """Whether both are the same weights, to the byte."""
        return self.shapes == other.shapes and filecmp.cmp(self.weights, other.weights, shallow=False)


class _Description(msgspec.Struct, frozen=True):
    policy: Policy
    dtype: str
    aliases: dict[str, str]
    kind: SnapshotKind = SnapshotKind.ANCHOR


def lay_out(
    snapshot: Path, policy: Policy, model_dir: Path, into: Path, dtype: str, fitting: Checkpoint | None
) -> Checkpoint:
    """Make ``into``/POLICY of a verified snapshot folder. Raises EngineError.

    dtype: element type the run's snapshots must have (field report E12).  fitting: the full weights that
    are installed, None for the first: those are compared with nothing but what the server makes of them.
    """
    described = _described(snapshot, policy, dtype)
    is_adapter = described.kind is SnapshotKind.ADAPTER
    weights = snapshot / (ADAPTER_NAME if is_adapter else OBJECT_NAME)
    shapes = _shapes(weights, policy)
    if fitting is not None and not is_adapter and shapes != fitting.shapes:
        raise EngineError(f"snapshot {policy} must hold the model's tensors: {_difference(shapes, fitting.shapes)}")
    if absent := sorted(set(described.aliases.values()) - shapes.keys()):
        raise EngineError(f"snapshot {policy} must hold the tensors it ties others to: {absent[:3]} are missing")
    folder = into / str(policy)
    remove_folder(folder)
    aside = into / f"{policy}.making"
    remove_folder(aside)
    aside.mkdir(parents=True)
    if is_adapter:
        _take(weights, aside / ADAPTER_NAME)
        _take(snapshot / ADAPTER_CONFIG_NAME, aside / ADAPTER_CONFIG_NAME)
    else:
        for path in sorted(model_dir.iterdir()):
            if path.is_file() and path.name not in LEFT_OUT and path.suffix != ".safetensors":
                _take(path, aside / path.name)
        if not (aside / CONFIG_NAME).is_file():
            raise EngineError(f"{model_dir} must hold {CONFIG_NAME}, it does not")
        _put_weights(weights, described.aliases, aside / OBJECT_NAME)
    aside.rename(folder)
    return Checkpoint(policy, folder, is_adapter, shapes)


def model_limits(model_dir: Path) -> tuple[int | None, int | None]:
    """(vocabulary, context length) that config.json states; None for what it does not."""
    try:
        config = json.loads((model_dir / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{model_dir} must hold a readable {CONFIG_NAME}: {error}") from error
    text = config.get("text_config") or config
    limits = [text.get("vocab_size"), text.get("max_position_embeddings") or text.get("n_positions")]
    vocabulary, context = (limit if isinstance(limit, int) and limit > 0 else None for limit in limits)
    return vocabulary, context


def _described(snapshot: Path, policy: Policy, dtype: str) -> _Description:
    try:
        described = msgspec.json.decode((snapshot / MANIFEST_NAME).read_bytes(), type=_Description)
    except (OSError, msgspec.DecodeError) as error:
        raise EngineError(f"snapshot {policy} must hold {OBJECT_NAME} and {MANIFEST_NAME}: {error}") from error
    if described.policy != policy:
        raise EngineError(f"snapshot {policy} was asked for, the folder holds {described.policy}")
    if described.dtype != dtype:
        raise EngineError(f"snapshot {policy} must hold {dtype}, it holds {described.dtype}")
    return described


def _shapes(weights: Path, policy: Policy) -> Shapes:
    """Also checks that the file's header and length belong together."""
    try:
        with safe_open(weights, framework="numpy") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
            return {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise EngineError(f"snapshot {policy} must hold a whole {weights.name}: {error}") from error


def _difference(shapes: Shapes, fitting: Shapes) -> str:
    missing, foreign = sorted(fitting.keys() - shapes.keys()), sorted(shapes.keys() - fitting.keys())
    if missing or foreign:
        return f"{len(missing)} missing {missing[:3]}, {len(foreign)} unknown {foreign[:3]}"
    name = next(name for name in sorted(shapes) if shapes[name] != fitting[name])
    return f"{name} must be {fitting[name]}, it is {shapes[name]}"


def _take(source: Path, target: Path) -> None:
    """By a hard link where the file system has them, so that nothing is copied and nothing dangles."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _put_weights(source: Path, aliases: Mapping[str, str], target: Path) -> None:
    if all(alias.endswith(HEADS) for alias in aliases):
        _take(source, target)
        return
    # Loaders go by the input layer's name; here it is tied to a tensor that is stored under another one (E01).
    _write_with_aliases(source, aliases, target)


def _write_with_aliases(source: Path, aliases: Mapping[str, str], target: Path) -> None:
    """The same file with every tied name as a tensor of its own."""
    with source.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        body, end = 8 + length, source.stat().st_size - 8 - length
        copies = []
        for alias, name in sorted(aliases.items()):
            first, last = header[name]["data_offsets"]
            header[alias] = {**header[name], "data_offsets": [end, end + last - first]}
            copies.append((body + first, last - first))
            end += last - first
        words = json.dumps(header, separators=(",", ":")).encode()
        words += b" " * (-len(words) % 8)
        with target.open("wb") as made:
            made.write(len(words).to_bytes(8, "little") + words)
            opened.seek(body)
            shutil.copyfileobj(opened, made, 1 << 20)
            for start, count in copies:
                opened.seek(start)
                made.write(opened.read(count))

"""``echo2 snapshot pack | verify | diff | apply``: the snapshot format on files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo2.cli.output import JsonFlag, print_json

if TYPE_CHECKING:
    from echo2.broadcast.manifest import Manifest

app = typer.Typer(help="Make and check snapshots.", no_args_is_help=False)


@app.command("pack")
def pack(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Model directory with safetensors weights.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Snapshot folder to make.")],
    as_json: JsonFlag = False,
) -> None:
    """Make a snapshot of a model directory."""
    from echo2.broadcast.pack import pack_directory

    _tell(pack_directory(source, out), out, as_json)


@app.command("verify")
def verify(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="Snapshot folder.")], as_json: JsonFlag = False
) -> None:
    """Compare every byte of a snapshot with its manifest; exit code 1 when they differ."""
    from echo2.broadcast.pack import verify_directory
    from echo2.errors import IntegrityError

    try:
        manifest = verify_directory(folder)
    except IntegrityError as error:
        if as_json:
            print_json({"ok": False, "folder": _shown(folder), "fault": _shown(str(error))})
        raise
    _tell(manifest, folder, as_json, "verified: every byte is what the manifest says")


@app.command("diff")
def diff(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="Snapshot folder or model directory that others have.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Snapshot folder or model directory that they shall get.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="PATCH", help="Patch file to make.")],
    as_json: JsonFlag = False,
) -> None:
    """Write what changed between two models as one small file; all of the newer one where that is smaller."""
    from echo2.broadcast.patch import write_patch

    head = write_patch(base, new, out)
    manifest = head.manifest
    patch_bytes = out.stat().st_size
    raw_bytes = sum(tensor.nbytes for tensor in manifest.tensors)
    facts: dict[str, Any] = {
        "ok": True,
        "patch": _shown(out),
        "kind": manifest.kind.value,
        "why": head.why,
        "policy": str(manifest.policy),
        "bytes": patch_bytes,
        "raw_bytes": raw_bytes,
        "share": patch_bytes / raw_bytes if raw_bytes else None,
        "files": [asset.name for asset in head.files],
        "base_root": manifest.base_root,
        "decoded_root": manifest.decoded_root,
    }
    if as_json:
        print_json(facts)
        return
    told = f"an anchor, which applies to any base, because {head.why}" if head.why else "a delta, for this base only"
    share = f", {100 * patch_bytes / raw_bytes:.3g} % of the weights" if raw_bytes else ""
    print(f"{_shown(out)}: {told}; {patch_bytes} bytes{share}")
    if head.files:
        print(f"with {', '.join(facts['files'])}")


@app.command("apply")
def apply(
    base: Annotated[Path, typer.Argument(metavar="BASE", help="What the patch was made from.")],
    patch: Annotated[Path, typer.Argument(metavar="PATCH", help="File that ``diff`` made.")],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="OUT", help="Snapshot folder to make.")],
    as_json: JsonFlag = False,
) -> None:
    """Make the newer model of its base and a patch, and check every byte of it."""
    from echo2.broadcast.patch import apply_patch

    _tell(apply_patch(base, patch, out), out, as_json)


def _tell(manifest: Manifest, folder: Path, as_json: bool, said: str = "") -> None:
    facts: dict[str, Any] = {
        "ok": True,
        "folder": _shown(folder),
        "run_id": manifest.run_id,
        "policy": str(manifest.policy),
        "kind": manifest.kind.value,
        "dtype": manifest.dtype,
        "tensors": len(manifest.tensors),
        "tied": len(manifest.aliases),
        "bytes": manifest.object_size,
        "chunks": len(manifest.chunks),
        "object_root": manifest.object_root,
        "decoded_root": manifest.decoded_root,
    }
    if as_json:
        print_json(facts)
    else:
        print("\n".join(f"{name:<13}{value}" for name, value in facts.items() if name != "ok"))
        if said:
            print(said)


def _shown(text: Path | str) -> str:
    """As it can be printed anywhere: a name on disk need not be text."""
    return os.fsencode(text).decode("utf-8", "backslashreplace")

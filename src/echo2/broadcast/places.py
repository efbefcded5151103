"""Where commands make what they are asked for.

Invariant: an output is whole or absent, and so is every folder that was made for it; nothing that was there before is
written to, followed or removed, except the unfinished folder of an earlier attempt. A path that cannot be used is the
user's mistake and told in one sentence.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo2.durable import room_for
from echo2.errors import UserError

_MISTAKES = frozenset(
    {
        errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY,
        errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS,
    }
)  # fmt: skip
"""What a wrong path or its permissions cause; an input/output error is not among them."""


@contextmanager
def users_paths() -> Iterator[None]:
    """Tell what the system says about a path that the user chose as UserError; other errors pass. Also a decorator."""
    try:
        yield
    except OSError as error:
        if error.errno not in _MISTAKES:
            raise
        place = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else "the path"
        raise UserError(
            f"{place} must be a path that can be used here, got: {error.strerror}; check the path and its permissions"
        ) from error


def beside(out: Path, suffix: str) -> Path:
    """The name under which ``out`` is made first. Raises UserError when it has no name of its own."""
    if out.name in ("", ".."):
        raise UserError(f"the output must be a new name in a directory, got {str(out)!r}; end it with a name")
    return out.with_name(out.name + suffix)


def check_free(out: Path, *, folder: Path | None = None, files: tuple[Path, ...] = ()) -> None:
    """Raises UserError unless ``out`` can be made: it is absent and its parent is, or can become, a directory.

    folder, files: where the output is made first; what an earlier attempt left there is no hindrance.
    """
    if os.path.lexists(out):
        what = " (it is a link to nothing)" if not out.exists() else ""
        raise UserError(f"{out} must not exist yet{what}; choose another name or remove it")
    for parent in out.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise UserError(f"{parent} must be a directory to hold {out}; choose another place")
            break
    for path in (*files, *([folder] if folder is not None else [])):
        ours = path.is_dir() if path == folder else path.is_file()
        if os.path.lexists(path) and (path.is_symlink() or not ours):
            raise UserError(f"{path} is where {out.name} is made first and must not exist; move it away")


@contextmanager
def folders_for(out: Path) -> Iterator[None]:
    """The folders above ``out`` exist inside; if it could not be made, those made for it are removed again."""
    made = [parent for parent in out.parents if not parent.exists()]
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in made:
            with contextlib.suppress(OSError):  # absent, or somebody else uses it by now
                parent.rmdir()
        raise


@contextmanager
def made_in(aside: Path, out: Path) -> Iterator[Path]:
    """Empty folder ``aside``, beside ``out``, to make it in; whatever goes wrong, it is removed. Raises DiskFull."""
    with room_for(out), folders_for(out):
        shutil.rmtree(aside, ignore_errors=True)  # what an earlier attempt left
        aside.mkdir()
        try:
            yield aside
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise

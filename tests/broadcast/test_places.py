from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from echo2.broadcast.places import beside, check_free, folders_for, made_in, users_paths
from echo2.errors import UserError


def test_a_place_is_free_where_nothing_is_and_a_folder_can_be(tmp_path: Path) -> None:
    check_free(tmp_path / "x")
    check_free(tmp_path / "new" / "folders" / "x", folder=tmp_path / "new" / "folders" / "x.partial")
    (tmp_path / "x.partial").mkdir()
    (tmp_path / "x.aside").touch()
    check_free(tmp_path / "x", folder=tmp_path / "x.partial", files=(tmp_path / "x.aside",))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.aside", "x.partial"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("file", "file must not exist yet; choose another name"),
        ("dangling", r"dangling must not exist yet \(it is a link to nothing\)"),
        ("loop", "loop must not exist yet"),
        ("file/x", "file must be a directory to hold"),
        ("file/new/x", "file must be a directory to hold"),
        ("dangling/x", "dangling must be a directory to hold"),
    ],
)
def test_a_place_that_is_taken_or_lies_in_no_directory_is_the_users_mistake(
    tmp_path: Path, name: str, sentence: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match=sentence):
        check_free(tmp_path / name)


@pytest.mark.parametrize("name", ["", ".", "/", "new/.."])
def test_an_output_has_a_name_of_its_own(name: str) -> None:
    assert beside(Path("x/y"), ".partial") == Path("x/y.partial")
    with pytest.raises(UserError, match="must be a new name in a directory, got"):
        beside(Path(name), ".partial")


def test_what_is_no_leftover_of_ours_is_not_written_over(tmp_path: Path) -> None:
    file, folder, link = tmp_path / "file", tmp_path / "folder", tmp_path / "link"
    file.touch()
    folder.mkdir()
    link.symlink_to(folder)
    for taken in (file, link):
        with pytest.raises(UserError, match=f"{taken.name} is where x is made first and must not exist; move it away"):
            check_free(tmp_path / "x", folder=taken)
    link.unlink()
    link.symlink_to(file)
    for taken in (folder, link):
        with pytest.raises(UserError, match="move it away"):
            check_free(tmp_path / "x", files=(taken,))


def fail(within: AbstractContextManager[object], work: Callable[[], object]) -> None:
    with within:
        work()
        raise KeyError


def test_folders_made_for_a_failure_are_removed_and_others_stay(tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        fail(folders_for(tmp_path / "a" / "b" / "x"), lambda: (tmp_path / "a" / "b").rmdir())
    with pytest.raises(KeyError):
        fail(folders_for(tmp_path / "a" / "b" / "x"), lambda: None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError):
        fail(folders_for(tmp_path / "a" / "b" / "x"), (tmp_path / "a" / "somebody's").touch)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["somebody's"]
    with folders_for(tmp_path / "c" / "x"):
        pass
    assert (tmp_path / "c").is_dir()


def test_an_unfinished_folder_begins_empty_and_ends_with_its_failure(tmp_path: Path) -> None:
    aside = tmp_path / "x.partial"
    aside.mkdir()
    (aside / "stale").touch()
    with made_in(aside, tmp_path / "x"):
        assert list(aside.iterdir()) == []
    with pytest.raises(KeyError):
        fail(made_in(aside, tmp_path / "x"), (aside / "new").touch)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_path_is_a_sentence_and_a_broken_disk_is_not(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match=r"absent must be a path .* got: No such file"),
        users_paths(),
    ):
        (tmp_path / "absent").read_bytes()
    with pytest.raises(UserError, match="File name too long"), users_paths():
        (tmp_path / ("x" * 300)).mkdir()
    with pytest.raises(OSError, match="Input/output"), users_paths():
        raise OSError(errno.EIO, os.strerror(errno.EIO))

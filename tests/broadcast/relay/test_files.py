from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from relays import Published, RunKeys
from swarm import until

from echo2.broadcast.relay.chunks import ChunkFile
from echo2.broadcast.relay.files import Files

KIB = 1024


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return RunKeys(tmp_path).publish(1, 64 * KIB, 16 * KIB)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path / "objects", owns=True)
    yield made
    made.close()


def work_off(files: Files) -> None:
    """All that was wished so far."""
    files._jobs.put(None)
    files.work()


def test_what_came_of_a_wish_counts_only_while_nothing_was_wished_since(files: Files, published: Published) -> None:
    came: list[tuple[int, int, bool]] = []

    def opened(file: ChunkFile, wish: int) -> None:
        came.append((wish, file.missing(), files.is_newest(published.root, wish)))

    def failed(why: str, wish: int) -> None:
        raise AssertionError(why)

    files.make(published.manifest, opened, failed)
    work_off(files)
    (file := files.get(published.root)) and file.put(0, published.content[: 16 * KIB])
    files.make(published.manifest, opened, failed)
    files.drop(published.root)
    files.make(published.manifest, opened, failed)
    work_off(files)
    count = len(published.manifest.chunks)
    assert came == [(1, count, True), (2, count - 1, False), (4, count, True)]


def test_a_file_that_cannot_be_made_is_told_with_its_wish(files: Files, published: Published) -> None:
    failures: list[tuple[str, int]] = []
    files.path(published.root).mkdir(parents=True)
    files.make(published.manifest, lambda file, wish: None, lambda why, wish: failures.append((why, wish)))
    work_off(files)
    assert len(failures) == 1
    assert "Is a directory" in failures[0][0]
    assert failures[0][1] == 1


def test_an_object_that_is_published_again_right_after_it_was_withdrawn_is_there(
    tmp_path: Path, published: Published
) -> None:
    files = Files(tmp_path / "objects", owns=False)
    files.adopt(published.manifest, published.path)
    files.drop(published.root)
    assert files.get(published.root) is None
    files.adopt(published.manifest, published.path)
    work_off(files)
    file = files.get(published.root)
    assert file is not None
    file.read_into(0, memoryview(bytearray(16 * KIB)))
    files.close()


def test_what_is_wished_from_another_thread_is_done_in_order(files: Files, published: Published) -> None:
    working = Thread(target=files.work)
    working.start()
    seen: list[int] = []
    for _ in range(5):
        files.make(published.manifest, lambda file, wish: seen.append(wish), lambda why, wish: seen.append(-wish))
        files.drop(published.root)
    until(lambda: len(seen) == 5, "all wishes")
    files.close()
    working.join(10.0)
    assert seen == [1, 3, 5, 7, 9]
    assert not files.path(published.root).exists()

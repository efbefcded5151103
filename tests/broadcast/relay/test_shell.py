from __future__ import annotations

import errno
from pathlib import Path

import pytest
from relays import RunKeys

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay import control as c
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.shell import RelayShell

KIB = 1024


class Still:
    """A node's relay whose threads do not run."""

    def __init__(self, keys: RunKeys) -> None:
        self.words: list[c.Word] = []
        self.shell = RelayShell(keys.opening("w1", 1), self.words.append)

    def obey(self, *orders: c.Order) -> None:
        for order in orders:
            self.shell.obey(order)
        self.shell._files._jobs.put(None)
        self.shell._files.work()


def test_a_chunk_that_cannot_be_stored_any_more_does_not_end_the_next_life_of_its_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys(tmp_path)
    published, still = keys.publish(1, 64 * KIB, 16 * KIB), Still(keys)
    bring = c.Bring(published.signed)
    still.obey(bring)
    file = still.shell._files.get(published.root)
    assert file is not None

    def put(number: int, data: object) -> None:
        still.obey(c.Withdraw(published.root), bring)
        raise OSError(errno.EBADF, "the object's file is closed")

    monkeypatch.setattr(file, "put", put)
    still.shell.chunk(1, published.root, 1, 0, memoryview(published.content[: 16 * KIB]))
    assert still.shell._node.report().needs == (published.root,)
    assert still.words == []


def test_a_chunk_that_cannot_be_stored_ends_its_own_life_of_the_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = RunKeys(tmp_path)
    published, still = keys.publish(1, 64 * KIB, 16 * KIB), Still(keys)
    still.obey(c.Bring(published.signed))
    file = still.shell._files.get(published.root)

    def put(number: int, data: object) -> None:
        raise OSError(errno.EIO, "the disk is broken")

    monkeypatch.setattr(file, "put", put)
    still.shell.chunk(1, published.root, 1, 0, memoryview(published.content[: 16 * KIB]))
    assert still.shell._node.report().needs == ()
    assert [word.root for word in still.words if isinstance(word, c.Stuck)] == [published.root]


def test_i9_only_the_seed_may_send_what_is_as_large_as_a_manifest(tmp_path: Path) -> None:
    still = Still(RunKeys(tmp_path))
    node = still.shell._node
    node.link_up(1, SEED, True, 0, 0.0)
    node.link_up(2, SEED, True, 1, 0.0)
    node.link_up(3, "w2", True, 0, 0.0)
    node.link_up(4, SEED, False, 0, 0.0)  # who dials us is a child, whatever it calls itself
    limits = [still.shell.control_limit(number) for number in (1, 2, 3, 4, 5)]
    assert limits == [f.MAX_CONTROL_BYTES, *[f.MAX_SMALL_BYTES] * 4]

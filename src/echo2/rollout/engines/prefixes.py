"""Keys and values of what was read before, for prompts that begin alike.

Invariant: an entry was computed under the installed weights; a switch empties the store. Its size has a bound in bytes,
and who was not asked for longest goes first.

A conversation's next prompt is its last prompt, its reply and something new: only the new part is read. Prompts that
share a system turn or examples share that part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from echo2.rollout.engines.slots import States

SHORTEST_PREFIX = 8
"""Tokens below which copying costs as much as reading."""

Ids = NDArray[np.int64]


class Prefixes:
    """capacity_bytes: bound on the stored states; 0 stores nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[bytes, tuple[Ids, States, int]] = OrderedDict()
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        self._entries.clear()
        self.held_bytes = 0

    def longest(self, token_ids: Sequence[int]) -> tuple[int, States]:
        """(length, states of that many tokens) of the longest known beginning of a prompt, its last token left out.

        The last token is always read anew: its logits are what the prompt is read for. (0, ()) where none is known.
        """
        wanted = np.asarray(token_ids[:-1], np.int64)
        best, found = 0, b""
        for key, (held, _, _) in self._entries.items():
            shared = common_length(wanted, held)
            if shared > best:
                best, found = shared, key
        if best < SHORTEST_PREFIX:
            return 0, ()
        self._entries.move_to_end(found)
        states = self._entries[found][1]
        return best, [(keys[:, :, :best], values[:, :, :best]) for keys, values in states]

    def keep(self, token_ids: Sequence[int], states: States) -> None:
        """states: [1, H, L, D] per layer of these L tokens, which nobody changes any more."""
        ids = np.asarray(token_ids, np.int64)
        size = sum(keys.nbytes + values.nbytes for keys, values in states)
        if len(ids) < SHORTEST_PREFIX or size > self._capacity:
            return
        for key, (held, _, _) in list(self._entries.items()):
            shared = common_length(ids, held)
            if shared == len(ids):
                return  # known, and more
            if shared == len(held):
                self._drop(key)
        self._entries[ids.tobytes()] = (ids, states, size)
        self.held_bytes += size
        while self.held_bytes > self._capacity:
            self._drop(next(iter(self._entries)))

    def _drop(self, key: bytes) -> None:
        self.held_bytes -= self._entries.pop(key)[2]


def common_length(one: Ids, other: Ids) -> int:
    """Tokens that both begin with."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length

"""What differs between two snapshots' words, found with torch, on the device that trains.

Invariant: the streams are those of ``broadcast.changes.encode_changes``, byte for byte, whatever device computes them;
only they come back to the host. Their format is described there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ESCAPE = 255

Words = NDArray[np.unsignedinteger[Any]]


class TorchChanges:
    """To be given to ``write_delta`` as ``changes``."""

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)

    def __call__(self, base: Words, new: Words) -> tuple[bytes, bytes, bytes]:
        """[n], [n] contiguous words of 1 to 8 bytes → streams ``gaps``, ``small``, ``large``."""
        # torch lacks most operations on unsigned words; differences modulo the width are the same on signed ones.
        differences = self._signed(new) - self._signed(base)
        positions = torch.nonzero(differences).squeeze(1)
        values = differences[positions].to(torch.int64)
        zigzag = (values << 1) ^ (values >> 63)
        escaped = (zigzag >= _ESCAPE) | (zigzag < 0)  # a word of 8 bytes may set the sign
        small = torch.where(escaped, _ESCAPE, zigzag).to(torch.uint8)
        return _bytes(_gaps(positions)), _bytes(small), _planes(zigzag[escaped], base.itemsize)

    def _signed(self, words: Words) -> Tensor:
        view = words.view(f"i{words.itemsize}")
        return torch.from_numpy(view if view.flags.writeable else view.copy()).to(self._device)


def _gaps(positions: Tensor) -> Tensor:
    """[changes] rising indices → uint8 stream in which 255 skips 255 elements."""
    gaps = torch.diff(positions, prepend=positions.new_full((1,), -1)) - 1
    escapes = gaps // _ESCAPE
    ends = torch.cumsum(escapes + 1, 0)
    length = int(ends[-1]) if len(ends) else 0
    stream = torch.full((length,), _ESCAPE, dtype=torch.uint8, device=positions.device)
    stream[ends - 1] = (gaps - escapes * _ESCAPE).to(torch.uint8)
    return stream


def _planes(values: Tensor, width: int) -> bytes:
    words = values.cpu().numpy().astype(f"<u{width}")
    return words.view(np.uint8).reshape(len(words), width).T.tobytes()


def _bytes(stream: Tensor) -> bytes:
    return stream.cpu().numpy().tobytes()

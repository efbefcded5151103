from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

pytest.importorskip("torch")

from echo2.broadcast.changes import encode_changes
from echo2.learning.changes import TorchChanges


@st.composite
def pairs(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any]]:
    width = draw(st.sampled_from([1, 2, 4, 8]))
    length = draw(st.integers(0, 1200))
    base = np.frombuffer(draw(st.binary(min_size=length * width, max_size=length * width)), f"<u{width}")
    new = base.copy()
    places = draw(st.lists(st.integers(0, max(length - 1, 0)), max_size=30)) if length else []
    for place in places:
        step = draw(st.one_of(st.integers(-200, 200), st.integers(0, 2 ** (8 * width) - 1)))
        new[place] = (int(new[place]) + step) % 2 ** (8 * width)
    return base, new


@settings(deadline=None, max_examples=100)
@given(pair=pairs())
def test_torch_finds_the_very_bytes_that_numpy_finds(pair: tuple[NDArray[Any], NDArray[Any]]) -> None:
    assert TorchChanges("cpu")(*pair) == encode_changes(*pair)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_torch_finds_them_when_everything_changed(width: int) -> None:
    random = np.random.default_rng(width)
    base, new = (random.integers(0, 256, 40_000, np.uint8).view(f"<u{width}") for _ in range(2))
    assert TorchChanges("cpu")(base, new) == encode_changes(base, new)

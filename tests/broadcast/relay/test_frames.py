from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.broadcast.parse import MAX_MANIFEST_BYTES
from echo2.broadcast.plan.model import MOST_STRETCHES, Stretch
from echo2.broadcast.relay import frames as f
from echo2.errors import Malformed

ROOT = "0" * 64
FRAMES = [
    f.Greet(1, "run", 7000, 2),
    f.Beat({1: 4, 7: 0}),
    f.Warm(1 << 20),
    f.Want(3, ROOT, (Stretch(0, 5), Stretch(9, 2, -1)), True, b"\x05", 2e6),
    f.Have(3, (1, 2)),
    f.Halt(3),
    f.Refuse(3, "busy"),
    f.Report(held=(ROOT,), progress={ROOT: 4}, edges={"w1": 1e6}, sent_bytes=5, accused=("w2",)),
    f.Assign(1, b"m", (f.Feed((f.Source("a", "host", 1),), (Stretch(0, 1),), 1.0, True, 2.0),), ("b",), 1),
]


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: type(frame).__name__)
def test_a_control_frame_comes_back_as_it_was(frame: f.Control) -> None:
    data = f.encode_control(frame)
    kind, _, _, length, _, _ = f.HEADER.unpack(data[: f.HEADER.size])
    assert (kind, length) == (f.CONTROL, len(data) - f.HEADER.size)
    assert f.decode_control(data[f.HEADER.size :]) == frame


@pytest.mark.parametrize(
    "frame",
    [
        {"type": "Have", "stream": -1, "numbers": []},
        {"type": "Have", "stream": 1, "numbers": [2**32]},
        {"type": "Want", "stream": 1, "root": "../../etc/passwd", "generation": 0, "stretches": [], "spills": True},
        {"type": "Report", "edges": {"a": float("nan")}},
        {"type": "Report", "edges": {"a": -1.0}},
        {"type": "Report", "sent_bytes": 2**63},
        {"type": "Warm", "nbytes": 2**40},
        {"type": "Greet", "protocol": 1, "run_id": "r", "port": 70000},
        {"type": "Want", "stream": 1, "root": ROOT, "stretches": [], "spills": True, "have": bytes(64 * 1024 + 1)},
        {"type": "Have", "stream": 1, "numbers": [1] * 65537},
        {"type": "Beat", "held": dict.fromkeys(range(65), 1)},
        {"type": "Nothing"},
        [],
    ],
    ids=lambda frame: str(frame)[:80],
)
def test_a_frame_outside_its_limits_is_refused_in_one_sentence(frame: object) -> None:
    with pytest.raises(Malformed, match="could not be read"):
        f.decode_control(msgspec.msgpack.encode(frame))


def test_i9_small_frames_have_room_for_all_that_an_honest_peer_says_and_for_little_more() -> None:
    shortest_hash = len('"",') + 64
    assert MAX_MANIFEST_BYTES // shortest_hash < 8 * f.MAX_BITMAP_BYTES, "an object with more chunks has no manifest"
    largest = [
        f.Want(1, ROOT, (Stretch(2**40, 2**40, -1),) * MOST_STRETCHES, True, bytes(f.MAX_BITMAP_BYTES), 1e15),
        f.Have(1, (2**32 - 1,) * 65536),
        f.Beat(dict.fromkeys(range(2**32 - f.MAX_STREAMS, 2**32), 2**32 - 1)),
    ]
    for frame in largest:
        body = f.encode_control(frame)[f.HEADER.size :]
        assert f.decode_control(body) == frame
        assert len(body) < f.MAX_SMALL_BYTES


@given(st.binary(max_size=200))
def test_any_bytes_are_a_frame_or_are_refused(data: bytes) -> None:
    with contextlib.suppress(Malformed):
        assert isinstance(f.decode_control(data), f.Control)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(Malformed):
        f.decode_control(b"\x91" * 100_000)


def test_padding_says_its_length() -> None:
    data = f.padding(100)
    assert f.HEADER.unpack(data[: f.HEADER.size])[3] == 100 == len(data) - f.HEADER.size

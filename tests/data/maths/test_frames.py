from __future__ import annotations

import pytest

from echo2.data.maths.frames import MAX_FRAME_BYTES, Ask, Inbox, Reached, Told, packed


def test_frames_arrive_whole_however_they_are_cut() -> None:
    sent = [Ask(1, "x", "y"), Reached("compare"), Told(1, "equal")]
    stream = b"".join(map(packed, sent))
    inbox = Inbox()
    assert [frame for place in range(len(stream)) for frame in inbox.feed(stream[place : place + 1])] == sent


def test_a_frame_over_the_limit_is_neither_written_nor_read() -> None:
    with pytest.raises(ValueError, match="at most"):
        packed(Ask(1, "x" * MAX_FRAME_BYTES, ""))
    with pytest.raises(ValueError, match="at most"):
        Inbox().feed((MAX_FRAME_BYTES + 1).to_bytes(4, "big"))

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.data.frames import Inbox, packed


class Note(msgspec.Struct, frozen=True):
    text: str


DECODER = msgspec.msgpack.Decoder(Note)


@given(st.lists(st.text(max_size=40)), st.integers(1, 9))
def test_frames_come_out_whole_however_their_bytes_come_in(texts: list[str], piece: int) -> None:
    sent = b"".join(packed(Note(text)) for text in texts)
    inbox = Inbox(DECODER)
    got = [note for at in range(0, len(sent), piece) for note in inbox.feed(sent[at : at + piece])]
    assert [note.text for note in got] == texts


def test_what_is_over_the_limit_is_neither_written_nor_read() -> None:
    with pytest.raises(ValueError, match="at most 64 bytes"):
        packed(Note("x" * 64), most_bytes=64)
    with pytest.raises(ValueError, match="at most 64 bytes, got 65"):
        Inbox(DECODER, most_bytes=64).feed((65).to_bytes(4, "big"))

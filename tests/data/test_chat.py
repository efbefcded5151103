from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.data.chat import ByteChat

CHAT = ByteChat()


@given(st.text(max_size=40))
def test_text_survives_and_cannot_make_a_control_token(text: str) -> None:
    token_ids = CHAT.render([{"role": "user", "content": text}], thinking=False)
    assert sum(token >= 256 for token in token_ids) == 3
    assert CHAT.decode(CHAT.encode_reply(text)) == text


def test_a_second_turn_closes_the_first_unless_the_policy_did() -> None:
    more = [{"role": "user", "content": "and?"}]
    closed = CHAT.extend(more, CHAT.END, thinking=False)  # type: ignore[arg-type]
    assert CHAT.extend(more, 65, thinking=False) == [CHAT.END, *closed]  # type: ignore[arg-type]


def test_odd_bytes_decode_without_failing() -> None:
    assert CHAT.decode([0xFF, 65, CHAT.END]) == "\ufffdA"
    assert [CHAT.piece(token) for token in (65, 10, CHAT.START, CHAT.END)] == ["A", "<0x0A>", "<start>", "<end>"]

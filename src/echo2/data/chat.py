"""Conversations as token ids, and back.

Invariant (I8, B01): only a chat template makes control tokens. Markers written inside a message stay text, split into
ordinary tokens, so the number of control tokens follows from the turns alone. Replies are never re-encoded (B10): a
conversation grows by appending (``extend``), so each turn's tokens extend the last turn's exactly (B03).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from echo2.data.task import Message


class ChatFormat(Protocol):
    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a reply."""
        ...

    def render(self, messages: Sequence[Message], *, thinking: bool) -> list[int]:
        """The opening of an episode, up to where the policy's reply begins. Raises UserError."""
        ...

    def extend(self, messages: Sequence[Message], last_token: int, *, thinking: bool) -> list[int]:
        """What follows a reply that ended with ``last_token``: its end-of-turn token unless the policy sampled it, the
        messages, and the opening of the next reply."""
        ...

    def encode_reply(self, text: str) -> list[int]:
        """A reply nobody sampled (a gold answer), with its end-of-turn token; for warm starts and inspection."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without control tokens; bytes that are no UTF-8 become U+FFFD."""
        ...

    def piece(self, token_id: int) -> str:
        """One token as people see it, control tokens included."""
        ...


class ByteChat:
    """UTF-8 bytes as tokens 0–255, and two control tokens. Needs no model; for scripted engines and simulation.

    Example: a user's ``hi`` is ``START user \\n hi END START assistant \\n``.
    """

    START = 256
    END = 257
    VOCABULARY = 258

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        return (self.END,)

    def render(self, messages: Sequence[Message], *, thinking: bool) -> list[int]:
        turns = [
            token
            for message in messages
            for token in (self.START, *f"{message['role']}\n{message['content']}".encode(), self.END)
        ]
        return [*turns, self.START, *b"assistant\n"]

    def extend(self, messages: Sequence[Message], last_token: int, *, thinking: bool) -> list[int]:
        end = [] if last_token == self.END else [self.END]
        return end + self.render(messages, thinking=thinking)

    def encode_reply(self, text: str) -> list[int]:
        return [*text.encode(), self.END]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < self.START).decode(errors="replace")

    def piece(self, token_id: int) -> str:
        if token_id >= self.START:
            return {self.START: "<start>", self.END: "<end>"}.get(token_id, f"<{token_id}>")
        return chr(token_id) if 0x20 <= token_id < 0x7F else f"<0x{token_id:02X}>"

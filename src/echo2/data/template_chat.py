"""Chat by a Hugging Face tokenizer and its own template.

Invariant: the control tokens of a rendered conversation are those of the same conversation with harmless contents. For
ordinary contents the ids equal the tokenizer's own ``apply_chat_template``; no system message is added by us. What was
said is never rendered again: a template that rewrites history, as those that take thoughts out of earlier turns, gets
no chance to, and one that leaves a message out, or moves it to another place, is refused.

How: the template is also rendered with placeholders for the contents. If the plain rendering has the same control
tokens, it is right as it is. Otherwise some content wrote a marker: then the text is cut at the template's own markers,
and what lies between is tokenised with markers split into ordinary sub-tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echo2.data.task import Message
from echo2.errors import UserError

_SLOT = "qslot{}zq{}q"
"""Placeholder of a content: letters and digits, which no template rewrites."""


class TemplateChat:
    """Raises UserError for a directory without a usable tokenizer or chat template."""

    def __init__(self, model_dir: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{model_dir} must hold a tokenizer that loads without a network: {reason}") from error
        if not getattr(self._tokenizer, "chat_template", None):
            raise UserError(f"the tokenizer in {model_dir} must have a chat template, it has none: save one beside it")
        self._control = frozenset(self._tokenizer.all_special_ids) | frozenset(
            token_id for token_id, token in self._tokenizer.added_tokens_decoder.items() if token.special
        )
        texts = [str(self._tokenizer.convert_ids_to_tokens(token_id)) for token_id in self._control]
        texts.sort(key=len, reverse=True)
        self._marker = re.compile("(" + "|".join(re.escape(text) for text in texts) + ")")
        self._end_of_turn = self._encode(self._tail([], thinking=False, opening=False))
        self._stop = self._stop_tokens(model_dir)

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence tokens of tokenizer and generation configuration, and the template's end of turn."""
        return self._stop

    def render(self, messages: Sequence[Message], *, thinking: bool) -> list[int]:
        contents = [message["content"] for message in messages]
        slots = _slots(contents)
        plain = self._template(messages, thinking)
        marked = self._template(
            [{**message, "content": slot} for message, slot in zip(messages, slots, strict=True)], thinking
        )
        return self._tokens(plain, marked, slots, contents)

    def extend(self, messages: Sequence[Message], last_token: int, *, thinking: bool) -> list[int]:
        contents = [message["content"] for message in messages]
        slots = _slots(contents)
        plain = self._tail(messages, thinking=thinking)
        marked = self._tail(
            [{**message, "content": slot} for message, slot in zip(messages, slots, strict=True)], thinking=thinking
        )
        token_ids = self._tokens(plain, marked, slots, contents)
        return token_ids[1:] if token_ids and token_ids[0] == last_token else token_ids

    def encode_reply(self, text: str) -> list[int]:
        return self._encode(text, split=True) + self._end_of_turn[:1]

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def piece(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    # ---- text --------------------------------------------------------------------------------------------------

    def _template(self, messages: Sequence[Any], thinking: bool, opening: bool = True) -> str:
        from jinja2 import TemplateError

        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opening, enable_thinking=thinking
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise UserError(f"the model's chat template must accept turns of {roles}; it says: {error}") from error
        return text

    def _tail(self, messages: Sequence[Any], *, thinking: bool, opening: bool = True) -> str:
        """The template's text after an assistant turn's content."""
        asked, replied = _slots([*(message["content"] for message in messages), "", ""])[-2:]
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": replied}, *messages]
        _, found, after = self._template(turns, thinking, opening).partition(replied)
        if not found or replied in after:
            raise UserError("the model's chat template must show an assistant turn's content once; it does not")
        return after

    # ---- tokens ------------------------------------------------------------------------------------------------

    def _encode(self, text: str, *, split: bool = False) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split)
        return token_ids

    def _tokens(self, plain: str, marked: str, slots: Sequence[str], contents: Sequence[str]) -> list[int]:
        places = [marked.find(slot) for slot in slots]
        if -1 in places or places != sorted(places):
            raise UserError(
                "the model's chat template must show every message, in the order in which they were said; it leaves out"
                " or moves one: send it under another role"
            )
        token_ids = self._encode(plain)
        if self._controls(token_ids) == self._controls(self._encode(marked)):
            return token_ids
        fill = dict(zip(slots, contents, strict=True))
        filled = _filled(marked, fill)
        if filled != plain:
            # Many templates trim contents.
            fill = {slot: content.strip() for slot, content in fill.items()}
            filled = _filled(marked, fill)
        if filled != plain:
            raise UserError(
                "a message holds control markers that this chat template would turn into turns of its own;"
                " take them out of the message"
            )
        return [token for part in self._marker.split(marked) for token in self._part(part, fill)]

    def _part(self, part: str, fill: dict[str, str]) -> list[int]:
        if self._marker.fullmatch(part):
            return self._encode(part)
        return self._encode(_filled(part, fill), split=True) if part else []

    def _controls(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self._control]

    def _stop_tokens(self, model_dir: Path) -> tuple[int, ...]:
        stop = [self._tokenizer.eos_token_id]
        generation = model_dir / "generation_config.json"
        if generation.is_file():
            named = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
            stop += named if isinstance(named, list) else [named]
        stop += [token for token in self._end_of_turn[:1] if token in self._control]
        found = tuple(dict.fromkeys(token for token in stop if isinstance(token, int)))
        if not found:
            raise UserError(f"the tokenizer in {model_dir} must name an end-of-sequence token, it names none")
        return found


def _slots(contents: Sequence[str]) -> list[str]:
    """One placeholder per content, none of which occurs in any content."""
    nonce = 0
    while any(_SLOT.format(nonce, "")[:-1] in content for content in contents):
        nonce += 1
    return [_SLOT.format(nonce, index) for index in range(len(contents))]


def _filled(text: str, fill: dict[str, str]) -> str:
    if not fill:
        return text
    slot = re.compile("|".join(map(re.escape, sorted(fill, key=len, reverse=True))))
    return slot.sub(lambda match: fill[match[0]], text)

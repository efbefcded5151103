"""Replies of any engine as completions, also where the engine takes conversations and gives text.

Invariant (I8): tokens of an engine that samples tokens are passed on as they are. Text is tokenised once, here, and
such a completion has no log-probs, so that nobody takes its tokens for those that were sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from echo2.data.chat import ChatFormat
from echo2.data.task import Message
from echo2.errors import EngineError
from echo2.rollout.engine import Completion, Engine, Heard, SpeakingEngine, Spoken
from echo2.types import FinishReason, Sampling


async def replies(
    engine: Engine,
    chat: ChatFormat,
    messages: Sequence[Message],
    token_ids: Sequence[int],
    sampling: Sampling,
    n: int,
    heard: Heard | None = None,
    *,
    thinking: bool,
) -> list[Completion]:
    """n replies to a conversation that is ``token_ids`` in the chat format. Raises EngineError."""
    if engine.capabilities.token_in:
        asked = (token_ids, sampling, n)
        return await (engine.generate(*asked) if heard is None else engine.generate(*asked, heard))
    speaking = cast("SpeakingEngine", engine)
    said = await speaking.speak(messages, sampling, n, thinking=thinking)
    completions = [as_completion(chat, spoken) for spoken in said]
    if heard is not None:
        for position, completion in enumerate(completions):
            heard(position, completion)
    return completions


def as_completion(chat: ChatFormat, spoken: Spoken) -> Completion:
    """Raises EngineError for a reply of nothing that was cut, which has no tokens."""
    token_ids = chat.encode_reply(spoken.text)
    if spoken.finish_reason is FinishReason.LENGTH and token_ids and token_ids[-1] in chat.stop_token_ids:
        token_ids = token_ids[:-1]  # it did not end
    if not token_ids:
        raise EngineError("a reply must have a token, the server gave none")
    return Completion(tuple(token_ids), None, spoken.policy_min, spoken.policy_max, spoken.finish_reason)

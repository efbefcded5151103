"""What a server said, and whether it can be true. Pure.

Invariant (I5, I8): nothing becomes part of a completion before it was compared with what was asked: as many log-probs
as tokens, ids of the vocabulary, the model and the weights that are installed, an end that was asked for. A completion
never bears a version that some token of it was not sampled by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec

from echo2.data.task import Message
from echo2.errors import EngineError
from echo2.rollout.engine import Completion, policy_span
from echo2.types import LARGEST_LOGPROB, SMALLEST_LOGPROB, FinishReason, Policy, Sampling


class OtherWeights(EngineError):
    """The server has, or used, weights that nobody here gave it last."""


class Question(msgspec.Struct, frozen=True):
    """One row as it is put to a server."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    """Seed, limit and stop tokens are this request's own."""
    model: str
    """Name under which the server knows the weights that are meant."""
    label: str
    """Of the installed weights; caches of different labels are kept apart where the server can."""
    messages: tuple[Message, ...] = ()
    """In place of tokens, for a server that takes conversations."""
    thinking: bool = False


class Asking(Protocol):
    """What is to be asked, once the name and label of the weights are known."""

    @property
    def is_cut_by_context(self) -> bool: ...

    def question(self, model: str, label: str) -> Question: ...


class Answer(msgspec.Struct, frozen=True):
    """A server's reply to one row, whatever its wire format."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...] | None
    finish: str
    """``stop``, ``length`` or ``abort``."""
    model: str | None = None
    """That it says it used; None when it does not say."""
    labels: tuple[str, ...] | None = None
    """Of the weights that sampled some token; None when it does not say."""
    prompt_ids: tuple[int, ...] | None = None
    text: str | None = None
    """In place of tokens."""


def check_answer(answer: Answer, question: Question, *, logprobs: bool, vocabulary: int | None, is_cut: bool) -> None:
    """Raises EngineError with what must hold and what was got.

    logprobs: whether there must be some.  is_cut: the limit is what the context leaves, and servers differ in whether
    its last token counts.
    """
    count, limit = len(answer.token_ids), question.sampling.max_new_tokens
    if answer.model is not None and answer.model != question.model:
        raise EngineError(f"the server must answer as {question.model}, it answered as {answer.model}")
    if answer.labels is not None and (wrong := [label for label in answer.labels if label != question.label]):
        raise OtherWeights(f"the server must sample with weights {question.label}, it sampled with {wrong[0]}")
    if answer.prompt_ids is not None and answer.prompt_ids != question.token_ids:
        raise EngineError("the server must be fed the prompt's own tokens, it says that it was fed others")
    if question.messages:
        if answer.text is None or answer.finish not in ("stop", "length"):
            raise EngineError("the server must return text that ended with stop or length, it returned none")
        return
    if answer.finish not in ("stop", "length", "abort"):
        raise EngineError(f"the server must end a reply with stop or length, it ended with {answer.finish!r}")
    if count > limit or (not count and answer.finish != "abort"):
        raise EngineError(f"the server must return 1 to {limit} tokens, it returned {count}")
    if answer.finish == "length" and count < limit and not is_cut:
        raise EngineError(f"the server cut a reply of at most {limit} tokens after {count}; its context is too small")
    _check_tokens(answer.token_ids, question.sampling.stop_token_ids, vocabulary)
    if logprobs:
        _check_logprobs(answer.logprobs, count)


def _check_tokens(token_ids: Sequence[int], stops: Sequence[int], vocabulary: int | None) -> None:
    for position, token in enumerate(token_ids):
        if token < 0 or (vocabulary is not None and token >= vocabulary):
            raise EngineError(f"the server must return ids of the model's {vocabulary} tokens, it returned {token}")
        if token in stops and position < len(token_ids) - 1:
            raise EngineError(f"the server must end a reply at stop token {token}, it went on")


def _check_logprobs(logprobs: Sequence[float | None] | None, count: int) -> None:
    got = 0 if logprobs is None else len(logprobs)
    if got != count:
        raise EngineError(f"the server must return one log-prob for each of {count} tokens, it returned {got}")
    for value in logprobs or ():
        if value is None or not math.isfinite(value) or not SMALLEST_LOGPROB < value <= LARGEST_LOGPROB:
            raise EngineError(f"log-probs must be numbers of at most 0, the server returned {value}")


class Row:
    """One reply as its parts come in: an abort, or a stop that was not asked for, leaves a part to go on from."""

    def __init__(self, prompt: Sequence[int], sampling: Sampling, position: int, room: int | None) -> None:
        """room: tokens that fit behind the prompt; None where no context is known."""
        self._prompt = tuple(prompt)
        self._sampling = sampling
        self._position = position
        self._limit = sampling.max_new_tokens if room is None else min(sampling.max_new_tokens, room)
        self.is_cut_by_context = self._limit < sampling.max_new_tokens
        self._token_ids: list[int] = []
        self._logprobs: list[float] | None = []
        self._policies: list[Policy] = []
        self._finish: FinishReason | None = None

    @property
    def begun(self) -> bool:
        return bool(self._token_ids)

    @property
    def ended(self) -> bool:
        return self._finish is not None

    def question(self, model: str, label: str) -> Question:
        """What is still to be sampled. Every row has a seed of its own, and what goes on does not repeat its draws."""
        done = len(self._token_ids)
        sampling = msgspec.structs.replace(
            self._sampling,
            max_new_tokens=self._limit - done,
            seed=row_seed(self._sampling.seed, self._position, done),
        )
        return Question((*self._prompt, *self._token_ids), sampling, model, label)

    def take(self, answer: Answer, policy: Policy) -> None:
        """A checked answer, sampled under ``policy``."""
        self._token_ids += answer.token_ids
        self._policies += [policy] * len(answer.token_ids)
        if answer.logprobs is None or self._logprobs is None:
            self._logprobs = None
        else:
            self._logprobs += [min(value, 0.0) for value in answer.logprobs if value is not None]
        if self._token_ids and self._token_ids[-1] in self._sampling.stop_token_ids:
            self._finish = FinishReason.STOP
        elif len(self._token_ids) >= self._limit or answer.finish == "length":
            self._finish = FinishReason.LENGTH

    def completion(self) -> Completion:
        assert self._finish is not None, "it has ended"
        oldest, newest, versions = policy_span(self._policies)
        logprobs = None if self._logprobs is None else tuple(self._logprobs)
        return Completion(tuple(self._token_ids), logprobs, oldest, newest, self._finish, versions)


def row_seed(seed: int, position: int, done: int) -> int:
    """In [0, 2**31): the same for the same arguments, far apart for neighbouring ones."""
    mixed = (seed * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + done * 0x94D049BB133111EB + 1) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (mixed ^ (mixed >> 31)) >> 33

"""A lease met by a task and an engine: one group of trajectories, or the reasons why not.

Invariant: a record holds the very ids that were fed to and sampled by the engine, never re-tokenised text (I8, B10).
Every leased index gets exactly one submission; whatever goes wrong is a status, never a zero reward (I4).

A single-turn task's group is one call of the engine (the prompt is read once); a task that overrides ``rollout`` talks
in as many conversations as there are indices, side by side.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence

import msgspec

from echo2.data import given
from echo2.data.chat import ChatFormat
from echo2.data.given import ENDINGS, ended
from echo2.data.task import Episode, Message, Score, Task
from echo2.errors import EngineError, TaskFault
from echo2.ports import Clock
from echo2.rollout.engine import Completion, Engine, Heard
from echo2.rollout.spoken import replies
from echo2.transport.messages import LeaseGrant, RowSubmission
from echo2.types import (
    LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
    FinishReason,
    RowStatus,
    Sampling,
    Segment,
    Trajectory,
    pack_logprobs,
    pack_tokens,
)

MAX_ERROR_CHARS = 300
"""Enough to see what went wrong; a worker's traceback stays in its log."""


class Conversation:
    """A ``Talk`` that keeps the tokens."""

    def __init__(self, engine: Engine, chat: ChatFormat, sampling: Sampling, thinking: bool, position: int = 0) -> None:
        self.position = position
        self._engine = engine
        self._chat = chat
        self._sampling = sampling
        self._thinking = thinking
        self._token_ids: list[int] = []
        self._messages: list[Message] = []
        self.segments: list[Segment] = []
        self.completions: list[Completion] = []

    async def say(self, messages: Sequence[Message]) -> str:
        fed = self._fed(messages)
        # A seed of its own for each turn: the same numbers twice would tie the turns together.
        sampling = msgspec.structs.replace(self._sampling, seed=self._sampling.seed + len(self.completions))
        said = [*self._messages, *messages]
        ask = replies(self._engine, self._chat, said, [*self._token_ids, *fed], sampling, 1, thinking=self._thinking)
        (completion,) = await ask
        self._messages = said
        return self.hear(fed, completion)

    def recite(self, messages: Sequence[Message], reply: str) -> None:
        """Raises EngineError before a policy is installed.

        The reply bears the installed policy's tag, which is the policy it is news to, and no log-probs.
        """
        policy = self._engine.installed
        if policy is None:
            raise EngineError("a policy must be installed before anything is recited to it; activate one first")
        said = tuple(self._chat.encode_reply(reply))
        fed = self._fed(messages)
        self._messages += messages
        self.hear(fed, Completion(said, None, policy, policy, FinishReason.STOP))

    def _fed(self, messages: Sequence[Message]) -> list[int]:
        if not self.completions:
            return self._chat.render(messages, thinking=self._thinking)
        return self._chat.extend(messages, self._token_ids[-1], thinking=self._thinking)

    def hear(self, fed: Sequence[int], completion: Completion) -> str:
        """Take up tokens and the reply they got; return its text."""
        return self.take_up(fed, Segment(pack_tokens(fed), False), completion)

    def take_up(self, fed: Sequence[int], asked: Segment, completion: Completion) -> str:
        """``hear``, where the tokens that were fed are packed already."""
        self._token_ids += [*fed, *completion.token_ids]
        self.segments += [asked, _sampled_segment(completion)]
        self.completions.append(completion)
        reply = self._chat.decode(completion.token_ids)
        self._messages.append({"role": "assistant", "content": reply})
        return reply


Judged = Callable[[Callable[[], Score]], Awaitable[Score]]
"""Where a task's plain ``score`` is called: in a thread where time is real, at once where it is not."""


async def judged_here(judge: Callable[[], Score]) -> Score:
    return judge()


async def run_group(
    engine: Engine,
    task: Task,
    chat: ChatFormat,
    lease: LeaseGrant,
    thinking: bool,
    clock: Clock,
    judged: Judged = judged_here,
) -> tuple[RowSubmission, ...]:
    """Run the lease's indices; one submission each, in their order. Only cancellation is raised.

    The stop tokens are the lease's, or the chat format's where it names none. Ω tells how long the episode took.
    """
    return await _Group(engine, task, chat, lease, thinking, clock, judged).run()


class _Group:
    def __init__(
        self,
        engine: Engine,
        task: Task,
        chat: ChatFormat,
        lease: LeaseGrant,
        thinking: bool,
        clock: Clock,
        judged: Judged,
    ) -> None:
        self._judged_where = judged
        self._engine = engine
        self._task = task
        self._chat = chat
        self._lease = lease
        self._thinking = thinking
        self._clock = clock
        self._started_s = clock.monotonic()
        self._sampling = lease.sampling
        if not self._sampling.stop_token_ids:
            self._sampling = msgspec.structs.replace(lease.sampling, stop_token_ids=chat.stop_token_ids)
        self._rows: dict[int, RowSubmission] = {}

    async def run(self) -> tuple[RowSubmission, ...]:
        indices = self._lease.indices
        if type(self._task).rollout is Task.rollout:
            await self._guarded(indices, self._one_turn())
        else:
            async with asyncio.TaskGroup() as group:
                for position, index in enumerate(indices):
                    group.create_task(self._guarded([index], self._conversation(index, position)))
        return tuple(self._rows[index] for index in indices)

    async def _guarded(self, indices: Sequence[int], work: Coroutine[None, None, None]) -> None:
        """Run ``work`` within the lease's time; the indices it left without a row get the reason."""
        try:
            async with asyncio.timeout(self._lease.timeout_s):
                await work
        except TimeoutError:
            status, error = RowStatus.TIMEOUT, f"no result within {self._lease.timeout_s:g} s"
        except ENDINGS as problem:
            status, error = RowStatus.ERROR, _sentence(ended(problem))
        except Exception as problem:
            status, error = _status_of(problem), _sentence(problem)
        else:
            return
        for index in indices:
            self._rows.setdefault(index, RowSubmission(index, status, error))

    async def _one_turn(self) -> None:
        prompt, indices = self._lease.prompt, self._lease.indices
        messages = given.messages(self._task, prompt)
        fed = self._chat.render(messages, thinking=self._thinking)

        def generate(heard: Heard | None = None) -> Coroutine[None, None, list[Completion]]:
            return replies(
                self._engine, self._chat, messages, fed, self._sampling, len(indices), heard, thinking=self._thinking
            )

        asked = Segment(pack_tokens(fed), False)
        if self._judged_where is judged_here and not self._judges_itself:  # nothing is waited for
            completions = await generate()
            for index, completion in zip(indices, completions, strict=True):
                await self._judged(index, fed, asked, completion)
            return
        failure: Exception | None = None
        # A reply is judged when it ends, while others grow, and one that is slow to judge delays no other.
        async with asyncio.TaskGroup() as group:

            def heard(position: int, completion: Completion) -> None:
                group.create_task(self._judged(indices[position], fed, asked, completion))

            try:
                await generate(heard)
            except Exception as problem:
                failure = problem  # what was heard before is still judged
        if failure is not None:
            raise failure

    async def _judged(self, index: int, fed: Sequence[int], asked: Segment, completion: Completion) -> None:
        try:
            prompt = self._lease.prompt
            talk = self._open_talk(self._sampling)
            reply = talk.take_up(fed, asked, completion)
            if self._judges_itself:
                score = await self._task.judge(prompt, reply)
            else:
                score = await self._judged_where(lambda: self._task.score(prompt, reply))
            self._finish(index, talk, Episode(score, self._task.metadata(prompt, reply)))
        except ENDINGS as problem:
            self._rows[index] = RowSubmission(index, RowStatus.ERROR, _sentence(ended(problem)))
        except Exception as problem:
            self._rows[index] = RowSubmission(index, _status_of(problem), _sentence(problem))

    @property
    def _judges_itself(self) -> bool:
        return type(self._task).judge is not Task.judge

    async def _conversation(self, index: int, position: int) -> None:
        seed = _conversation_seed(self._sampling.seed, position)
        talk = self._open_talk(msgspec.structs.replace(self._sampling, seed=seed), index)
        self._finish(index, talk, await self._task.rollout(self._lease.prompt, talk))

    def _open_talk(self, sampling: Sampling, index: int = 0) -> Conversation:
        return Conversation(self._engine, self._chat, sampling, self._thinking, index)

    def _finish(self, index: int, talk: Conversation, finished: Episode) -> None:
        episode = given.checked_episode(finished)
        if not self._engine.capabilities.token_in:
            episode = msgspec.structs.replace(episode, omega={**episode.omega, "retokenised": True})
        record = _record(self._lease, self._sampling, talk, episode, self._clock.monotonic() - self._started_s)
        self._rows[index] = RowSubmission(index, RowStatus.FINISHED, record=msgspec.Raw(msgspec.msgpack.encode(record)))


def _record(
    lease: LeaseGrant, sampling: Sampling, talk: Conversation, episode: Episode, episode_s: float
) -> Trajectory:
    """Raises EngineError or ValueError for an episode that makes no record."""
    if not talk.completions:
        raise ValueError("an episode must hold at least one reply of the policy, it holds none")
    oldest = min(completion.policy_min for completion in talk.completions)
    newest = max(completion.policy_max for completion in talk.completions)
    has_logprobs = all(completion.logprobs is not None for completion in talk.completions)
    return Trajectory(
        task=lease.prompt.task,
        prompt_id=lease.prompt.prompt_id,
        segments=tuple(talk.segments) if oldest == newest else _versioned(talk.segments, talk.completions),
        reward=episode.score.reward,
        policy_min=oldest,
        policy_max=newest,
        finish_reason=talk.completions[-1].finish_reason,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        logprob_convention=LOGPROBS_FULL_VOCAB_AT_TEMPERATURE if has_logprobs else None,
        normalisation_key=episode.normalisation_key,
        omega={**episode.omega, "status": episode.score.status, "episode_s": round(episode_s, 6)},
    )


def _sampled_segment(completion: Completion) -> Segment:
    if not completion.token_ids:
        raise EngineError("a completion must have at least one token, the engine returned none")
    if completion.logprobs is not None and len(completion.logprobs) != len(completion.token_ids):
        raise EngineError(
            f"a completion must have one log-prob per token, got {len(completion.logprobs)}"
            f" for {len(completion.token_ids)}"
        )
    return Segment(
        token_ids=pack_tokens(completion.token_ids),
        sampled=True,
        logprobs=None if completion.logprobs is None else pack_logprobs(completion.logprobs),
        versions=None if completion.versions is None else pack_tokens(completion.versions),
    )


def _versioned(segments: Sequence[Segment], completions: Sequence[Completion]) -> tuple[Segment, ...]:
    """Turns of different versions: each says its own, also where one version sampled the whole turn."""
    said, found = iter(completions), []
    for segment in segments:
        if segment.sampled:
            completion = next(said)
            if segment.versions is None:
                versions = [completion.policy_min.version] * len(completion.token_ids)
                segment = msgspec.structs.replace(segment, versions=pack_tokens(versions))
        found.append(segment)
    return tuple(found)


def _conversation_seed(seed: int, position: int) -> int:
    """Seeds of neighbouring conversations lie far apart, so their turns' seeds do not meet."""
    return seed * 1_000_003 + position * 10_007


def _status_of(problem: Exception) -> RowStatus:
    aborted = isinstance(problem, EngineError) and str(problem).startswith("aborted")
    return RowStatus.ABORTED if aborted else RowStatus.ERROR


def _sentence(problem: Exception) -> str:
    text = " ".join(str(problem).split())
    kind = "" if isinstance(problem, EngineError | TaskFault) else f"{type(problem).__name__}: "
    return f"{kind}{text}"[:MAX_ERROR_CHARS]

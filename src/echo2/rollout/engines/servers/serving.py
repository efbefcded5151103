"""The server and the policy it is meant to have.

Invariant (I5): an answer leaves here only when it was checked, came from the life of the server that it was asked of,
and the server does not say that other weights gave it. A server that died, hangs or has other weights is given the
installed ones again before anything more is asked of it; where that fails there is a fault, in a sentence.
"""

from __future__ import annotations

import asyncio

from echo2.data.task import Message
from echo2.errors import EngineError
from echo2.ports import EventLog
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.dialect import LOOK_S, Dialect, Facts
from echo2.rollout.engines.servers.host import Host
from echo2.rollout.engines.servers.rows import Answer, Asking, OtherWeights, Question, check_answer
from echo2.transport.json_line import NoAnswer, WrongAnswer
from echo2.types import Sampling

TRIES = 3
"""Of one request whose server died or hung under it."""
MOST_FRUITLESS = 3
"""Beginnings in a row after which no question was answered. The next failure is a fault: whoever asks for replies
waits, and its owner decides when another beginning is tried."""
PROBE = Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8, seed=1)
"""What is sampled, from fixed tokens, to see whether weights changed."""
PROBE_TOKENS = tuple(range(1, 9))
PROBE_MESSAGES: tuple[Message, ...] = ({"role": "user", "content": "Count."},)
FAILING = frozenset({500, 502, 503, 504})
"""Answers of a server that is failing, as opposed to one that says no."""
UNKNOWN = 404
"""Answer of a server that does not know the model, as one does that was started anew without our adapter."""

Sampled = tuple[tuple[int, ...], tuple[float | None, ...] | None] | None


class Serving:
    def __init__(
        self, dialect: Dialect, host: Host, vocabulary: int | None, request_s: float, install_s: float, events: EventLog
    ) -> None:
        """request_s, install_s: deadlines of one reply and of taking weights."""
        self._dialect = dialect
        self._host = host
        self._vocabulary = vocabulary
        self._request_s = request_s
        self._install_s = install_s
        self._events = events
        self._mending = asyncio.Lock()
        self._label = ""
        self._model = ""
        self._fault: str | None = None
        self._fruitless = 0
        """Beginnings since a question was answered."""
        self._closed = False
        self.facts: Facts | None = None
        self.current: Checkpoint | None = None
        """What is installed; None before the first."""
        self.base: Checkpoint | None = None
        """The full weights under an installed adapter, or those that are installed."""

    @property
    def fault(self) -> str | None:
        ended = self._host.ended
        return self._fault if ended is None else f"the {self._dialect.name} server must run: {ended}"

    def restarts_for(self, checkpoint: Checkpoint | None) -> bool:
        """Whether these weights can only be had by starting the server anew, as far as is known."""
        facts = self.facts
        if facts is None or checkpoint is None:
            return False
        return not (facts.takes_adapters if checkpoint.is_adapter else facts.takes_weights)

    async def halt(self) -> None:
        await self._dialect.halt(self._host.line)

    async def close(self) -> None:
        self._closed = True
        await self._host.close()
        await asyncio.to_thread(self._dialect.close)

    # ---- replies -----------------------------------------------------------------------------------------------

    async def ask(self, row: Asking) -> Answer:
        """What comes next of the row, from the next server if this one fails under the question. Raises EngineError.

        A server with a fault is not asked: after an install that failed half-way, its own word for its weights is old.
        """
        for tried in range(1, TRIES + 1):
            if self._fault is not None:
                raise EngineError(self._fault)
            life = self._host.life
            question = row.question(self._model, self._label)
            try:
                answer = await self._dialect.ask(self._host.line, question, self._request_s)
                check_answer(
                    answer,
                    question,
                    logprobs=self.has_logprobs(question.sampling),
                    vocabulary=self._vocabulary,
                    is_cut=row.is_cut_by_context,
                )
                await self._check_label(answer)
                self._fruitless = 0
                return answer
            except EngineError as error:
                if tried == TRIES or not _may_pass(error):
                    raise
                await self._mend(life, error)
        raise AssertionError("the last try returns or raises")

    def has_logprobs(self, sampling: Sampling) -> bool:
        return self._dialect.logprobs and (self._dialect.top_p_logprobs or sampling.top_p >= 1)

    async def _check_label(self, answer: Answer) -> None:
        """Where replies do not say which weights sampled them, the server is asked for it afterwards."""
        if answer.labels is None and self.facts is not None and self.facts.label_route:
            label = await self._dialect.label(self._host.line)
            if label != self._label:
                raise OtherWeights(f"the server must have weights {self._label}, it has {label}")

    # ---- a server that fails -----------------------------------------------------------------------------------

    async def _mend(self, life: int, error: EngineError) -> None:
        """Make the server serve the installed policy again. Raises ``error`` when it is well and did not do as asked.

        A well server that only failed at this one may be asked once more.
        """
        async with self._mending:
            if self._closed:
                raise EngineError("the engine was closed")
            if self._host.life != life:
                return  # somebody mended it meanwhile
            ailment = await self._ailment(error)
            if ailment is None:
                if isinstance(error, WrongAnswer) and error.status in FAILING:
                    return
                raise error
            if self._fruitless >= MOST_FRUITLESS:
                self._fault = f"the server was begun {self._fruitless} times and answered nothing each time: {ailment}"
                raise EngineError(self._fault) from error
            await self._begin_again(ailment)

    async def mend(self) -> None:
        """Serve the installed policy again where there is a fault, and see that a question is answered."""
        async with self._mending:
            ailment = self.fault
            if ailment is None or self._closed:
                return
            await self._begin_again(ailment)
            try:
                await self._probe(self._request_s)
            except EngineError as error:
                self._fault = str(error)
                raise

    async def _begin_again(self, ailment: str) -> None:
        assert self.current is not None, "something is installed"
        self._events.emit("server_lost", server=self._dialect.name, error=ailment)
        self._fruitless += 1
        await self.begin(self.current)
        self._events.emit("server_back", server=self._dialect.name, policy=str(self.current.policy))

    async def _ailment(self, error: EngineError) -> str | None:
        """Why the weights must be given to a server again; None when they need not."""
        if isinstance(error, OtherWeights):
            return str(error)
        if (ailment := await self._host.ailment()) is not None:
            return ailment
        if isinstance(error, WrongAnswer) and error.status == UNKNOWN and not self._host.is_managed:
            return str(error)
        try:
            if self.facts is not None and self.facts.label_route:
                label = await self._dialect.label(self._host.line)
                if label != self._label:
                    return f"it has weights {label}, not {self._label}"
            await self._probe(LOOK_S)
        except NoAnswer as silence:
            return f"it says that it is well and answers nothing: {silence}"
        except EngineError as refusal:
            return str(refusal)
        return None

    # ---- installs ----------------------------------------------------------------------------------------------

    async def begin(self, checkpoint: Checkpoint) -> None:
        """A server that serves these weights: a new one, or the one at the address told to take them.

        Raises EngineError, which is the fault then.
        """
        try:
            base = self.base if checkpoint.is_adapter else checkpoint
            if base is None:
                raise EngineError(
                    f"policy {checkpoint.policy} is an adapter, and there are no full weights to put it on"
                )
            facts = await self._host.begin(base)
            if self.facts is None:
                for note in facts.notes:
                    self._events.emit("server_found", server=self._dialect.name, note=note)
            self.facts = facts
            self._model = facts.model
            self._label = await self._dialect.label(self._host.line) if facts.label_route else ""
            if not self._host.is_managed or checkpoint.is_adapter:
                if not self._host.is_managed and checkpoint.is_adapter and facts.takes_weights:
                    await self._tell(base)
                self._check_takes(facts, checkpoint)
                await self._tell(checkpoint)
        except EngineError as error:
            self._fault = str(error)
            raise
        self._fault = None

    async def replace(self, before: Checkpoint, after: Checkpoint) -> None:
        """Other weights, while the server runs or by starting it anew. Raises EngineError, the old ones serving."""
        facts = self.facts
        assert facts is not None, "something was installed"
        why = "it takes no weights while it runs"
        if not self.restarts_for(after) and self._host.ended is None:
            try:
                await self._update(before, after)
                self._fault = None
                return
            except EngineError as error:
                self._events.emit("server_update_failed", policy=str(after.policy), error=str(error))
                if not self._host.is_managed:
                    await self._restore(before)
                    raise
            why = "it did not take them while it ran"
        elif not self._host.is_managed:
            self._check_takes(facts, after)
        self._events.emit("server_restarting", server=self._dialect.name, policy=str(after.policy), why=why)
        try:
            await self.begin(after)
        except EngineError:
            await self._restore(before)
            raise

    def install(self, checkpoint: Checkpoint) -> list[Checkpoint]:
        """From now on these are the installed weights; what is returned is not needed any more."""
        held = {id(old): old for old in (self.current, self.base) if old is not None}
        self.current = checkpoint
        if not checkpoint.is_adapter:
            self.base = checkpoint
        return [old for old in held.values() if old is not self.base]

    def _check_takes(self, facts: Facts, checkpoint: Checkpoint) -> None:
        if not (facts.takes_adapters if checkpoint.is_adapter else facts.takes_weights):
            what = "adapters" if checkpoint.is_adapter else "weights"
            advice = "; ".join(facts.notes) or "leave server.url empty, so that the worker starts it"
            raise EngineError(f"the {self._dialect.name} server takes no {what} while it runs: {advice}")

    async def _restore(self, before: Checkpoint) -> None:
        """After an install that failed: the old weights again, or a fault."""
        try:
            await self.begin(before)
        except EngineError as error:
            self._events.emit("server_lost", server=self._dialect.name, error=str(error))

    async def _update(self, before: Checkpoint, after: Checkpoint) -> None:
        """Give the running server other weights and see that it took them. Raises EngineError."""
        unchanged = await asyncio.to_thread(before.holds_what, after)
        first = await self._probe(self._request_s)
        await self._tell(after)
        if first is not None and not unchanged and await self._probe(self._request_s) == first:
            raise EngineError(
                f"the {self._dialect.name} server said that it took policy {after.policy}, "
                "and samples exactly as before"
            )
        if before.is_adapter:
            await self._dialect.forget(self._host.line, weights_name(before))

    async def _tell(self, checkpoint: Checkpoint) -> None:
        """Raises EngineError when the server says no, or says another version than it was told."""
        name = weights_name(checkpoint)
        if checkpoint.is_adapter:
            await self._dialect.adapt(self._host.line, checkpoint, name, self._install_s)
            self._model = name
            return
        await self._dialect.update(self._host.line, checkpoint, name, self._install_s)
        self._label = name
        if self.facts is not None and self.facts.label_route:
            label = await self._dialect.label(self._host.line)
            if label != name:
                raise EngineError(f"the server must have weights {name} after it took them, it says {label}")

    async def _probe(self, deadline_s: float) -> Sampled:
        """Tokens and log-probs that the same weights on an idle server give again, to the digit; None without those."""
        prompt = tuple(token for token in PROBE_TOKENS if self._vocabulary is None or token < self._vocabulary)
        question = Question(prompt, PROBE, self._model, self._label, PROBE_MESSAGES)
        answer = await self._dialect.ask(self._host.line, question, deadline_s)
        return None if answer.logprobs is None else (answer.token_ids, answer.logprobs)


def weights_name(checkpoint: Checkpoint) -> str:
    return f"policy-{checkpoint.policy}"


def _may_pass(error: EngineError) -> bool:
    """Whether another try may end otherwise."""
    if isinstance(error, WrongAnswer):
        return error.status in FAILING or error.status == UNKNOWN
    return isinstance(error, NoAnswer | OtherWeights)

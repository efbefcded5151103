"""An engine that follows a script: no model, no torch, the same replies for the same question every time.

Invariant: a reply is a function of (prompt tokens, seed, row, policy) alone; time passes only in ``sleep``, so in
virtual time a generation lasts exactly ``duration``.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from random import Random

from echo2.data.chat import ByteChat
from echo2.errors import EngineError
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard, policy_span
from echo2.types import FinishReason, Policy, Sampling

Script = Callable[[str, Random, Policy], str]
"""(prompt text, the row's own random numbers, policy that begins the reply) → reply text"""

FIRST_SKILL = 0.2
SKILL_PER_VERSION = 0.05
BEST_SKILL = 0.95

_SUM = re.compile(r"(\d+)\s*([+*-])\s*(\d+)")


def improving_sums(prompt: str, random: Random, policy: Policy) -> str:
    """Answer the last sum in the prompt, right more often the newer the policy is, so that curves rise."""
    sums = _SUM.findall(prompt)
    if not sums:
        return "?"
    left, sign, right = sums[-1]
    a, b = int(left), int(right)
    answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
    skill = min(BEST_SKILL, FIRST_SKILL + SKILL_PER_VERSION * policy.version)
    return str(answer if random.random() < skill else answer + random.randint(1, 9))


def no_time(prompt_tokens: int, n: int, random: Random) -> float:
    return 0.0


class ScriptedEngine:
    """Speaks ``ByteChat``. duration: seconds of a generation from (prompt tokens, n, random numbers of the call)."""

    def __init__(
        self,
        script: Script = improving_sums,
        *,
        duration: Callable[[int, int, Random], float] = no_time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        activation_s: float = 0.0,
    ) -> None:
        self._script = script
        self._duration = duration
        self._sleep = sleep
        self._activation_s = activation_s
        self._chat = ByteChat()
        self._installed: Policy | None = None
        self._prefetched: Policy | None = None
        self._epoch = 0
        """Raised by an abort; a generation of an older one ends as aborted."""
        self._running = 0
        self._switching = False
        self._changed = asyncio.Condition()

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(logprobs=True, token_in=True, modes=frozenset(ActivationMode))

    @property
    def installed(self) -> Policy | None:
        return self._installed

    @property
    def fault(self) -> str | None:
        return None

    async def mend(self) -> None:
        """There is never a fault."""

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._switching)
            began, epoch = self._installed, self._epoch
            if began is None:
                raise EngineError("a policy must be installed before anything is generated; activate one first")
            self._running += 1
        try:
            draws = _draws(_question(token_ids, sampling.seed), -1)
            await self._sleep(self._duration(len(token_ids), n, draws))
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify_all()
        if epoch != self._epoch:
            raise EngineError(f"aborted: policy {self._installed} was activated")
        ended = self._installed
        assert ended is not None, "an installed policy is only ever replaced"
        question, text = _question(token_ids, sampling.seed), self._chat.decode(token_ids)
        group = [self._reply(text, _draws(question, row), sampling, began, ended) for row in range(n)]
        if heard is not None:
            for position, completion in enumerate(group):
                heard(position, completion)
        return group

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        self._prefetched = policy

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        if policy == self._installed:
            return
        if policy != self._prefetched:
            raise EngineError(f"policy {policy} must be prefetched before it is activated")
        async with self._changed:
            await self._changed.wait_for(lambda: not self._switching)
            self._switching = True
            try:
                if mode is ActivationMode.DRAIN:
                    await self._changed.wait_for(lambda: not self._running)
                elif mode is ActivationMode.ABORT:
                    self._epoch += 1
                await self._sleep(self._activation_s)
                self._installed = policy
            finally:
                self._switching = False
                self._changed.notify_all()

    async def close(self) -> None:
        self._prefetched = None

    def _reply(self, text: str, random: Random, sampling: Sampling, began: Policy, ended: Policy) -> Completion:
        reply = self._chat.encode_reply(self._script(text, random, began))
        finish = FinishReason.STOP if len(reply) <= sampling.max_new_tokens else FinishReason.LENGTH
        reply = reply[: sampling.max_new_tokens]
        logprobs = tuple(-random.random() for _ in reply)
        policies = [began] * len(reply)
        if len(reply) > 1:
            # A switch in mid-reply shows on the last token.
            policies[-1] = ended
        oldest, newest, versions = policy_span(policies)
        return Completion(tuple(reply), logprobs, oldest, newest, finish, versions)


def _question(token_ids: Sequence[int], seed: int) -> bytes:
    return f"{seed}/{','.join(map(str, token_ids))}".encode()


def _draws(question: bytes, row: int) -> Random:
    """The row's own random numbers; row -1 is for the call as a whole."""
    digest = hashlib.blake2b(question, digest_size=8, person=row.to_bytes(8, "little", signed=True)).digest()
    return Random(int.from_bytes(digest, "little"))

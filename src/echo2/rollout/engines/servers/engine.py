"""Any inference server as an engine: one class for all kinds, each with its dialect.

Invariant (I5): ``installed`` changes only when the server has the weights, and a reply counts for a policy only if no
switch ran between its question and its answer. What cannot be shown is an EngineError, never a tag.

    generate ──row by row──▶ gate ──▶ server ──▶ checks ──▶ completions
    activate ──▶ gate closed: drained, aborted, or halted and gone on with later
             ──▶ weights taken while it runs, or the server started anew with them
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec

from echo2.config.sections import ServerSection
from echo2.durable import remove_folder
from echo2.errors import EngineError, first_cause
from echo2.ports import EventLog
from echo2.rollout.engine import ActivationMode, Capabilities, Completion, Heard
from echo2.rollout.engines.servers.checkpoint import Checkpoint, lay_out, model_limits
from echo2.rollout.engines.servers.dialect import Dialect
from echo2.rollout.engines.servers.gate import Gate
from echo2.rollout.engines.servers.host import Host
from echo2.rollout.engines.servers.rows import Row
from echo2.rollout.engines.servers.serving import Serving
from echo2.types import Policy, Sampling


class ServerEngine:
    def __init__(
        self,
        dialect: Dialect,
        host: Host,
        model_dir: Path,
        folder: Path,
        dtype: str,
        settings: ServerSection,
        events: EventLog,
    ) -> None:
        """model_dir: configuration and tokenizer.  folder: for checkpoints; ours alone."""
        self._dialect = dialect
        self._model_dir = model_dir
        self._folder = folder
        self._dtype = dtype
        self._vocabulary, self._context = model_limits(model_dir)
        self._gate = Gate()
        self._serving = Serving(
            dialect, host, self._vocabulary, settings.request_timeout_s, settings.start_timeout_s, events
        )
        self._aside: Checkpoint | None = None
        self.installed: Policy | None = None

    @property
    def capabilities(self) -> Capabilities:
        facts = self._serving.facts
        modes = {ActivationMode.DRAIN, ActivationMode.ABORT}
        if facts is not None and facts.halts:
            modes.add(ActivationMode.CONTINUE)
        return Capabilities(
            logprobs=self._dialect.logprobs,
            token_in=True,
            modes=frozenset(modes),
            seeded=False,  # the order of sums in a batch, and so a rare token, depends on what else is in it
            top_p_logprobs=self._dialect.top_p_logprobs,
            restarts=self._serving.restarts_for(self._aside or self._serving.current),
        )

    @property
    def fault(self) -> str | None:
        return None if self.installed is None else self._serving.fault

    async def mend(self) -> None:
        if self.fault is not None:
            async with self._gate.entered(begun=False) as leave:  # not while weights are switched
                await leave.within(self._serving.mend())

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        if self.installed is None:
            raise EngineError("a policy must be installed before anything is generated; activate one first")
        room = self._room(token_ids)
        stops = tuple(t for t in sampling.stop_token_ids if self._vocabulary is None or t < self._vocabulary)
        asked = msgspec.structs.replace(sampling, stop_token_ids=stops)  # servers refuse tokens that do not exist
        rows = [Row(token_ids, asked, position, room) for position in range(n)]
        try:
            async with asyncio.TaskGroup() as group:
                for position, row in enumerate(rows):
                    group.create_task(self._finish(row, position, heard), name=f"row {position}")
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from errors
        return [row.completion() for row in rows]

    def _room(self, token_ids: Sequence[int]) -> int | None:
        """Tokens that fit behind the prompt; None where no context is known. Raises EngineError for a prompt unfit."""
        context = self._context
        if (facts := self._serving.facts) is not None and facts.context is not None:
            context = min(facts.context, context or facts.context)
        room = None if context is None else context - len(token_ids)
        if not token_ids or (room is not None and room < 1):
            most = "" if context is None else f" to {context - 1} tokens (context {context})"
            raise EngineError(f"a prompt must have 1{most}, it has {len(token_ids)}")
        return room

    async def _finish(self, row: Row, position: int, heard: Heard | None) -> None:
        while not row.ended:
            async with self._gate.entered(begun=row.begun) as leave:
                policy = self.installed
                if policy is None:
                    raise EngineError("the engine was closed")
                answer = await leave.within(self._serving.ask(row))
                if answer.finish == "abort" and self._gate.is_open:
                    raise EngineError("aborted: the server ended the reply, and nobody here asked for that")
                row.take(answer, policy)
        if heard is not None:
            heard(position, row.completion())

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        into, fitting = self._folder / "checkpoints", self._serving.base
        if self._aside is None and self._serving.current is None:  # what a worker that was killed left
            await asyncio.to_thread(remove_folder, into)
        laid = await asyncio.to_thread(lay_out, folder, policy, self._model_dir, into, self._dtype, fitting)
        if self._aside is not None and self._aside.policy not in (policy, self.installed):
            await asyncio.to_thread(remove_folder, self._aside.folder)
        self._aside = laid

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        if policy == self.installed:
            return
        if mode not in self.capabilities.modes:
            raise EngineError(f"a switch must be one of {', '.join(sorted(self.capabilities.modes))}, got {mode}")
        if self._aside is None or self._aside.policy != policy:
            raise EngineError(f"policy {policy} must be prefetched before it is activated")
        after, before = self._aside, self._serving.current
        async with self._gate.closing(mode, self._serving.halt):
            if before is None:
                await self._serving.begin(after)
            else:
                await self._serving.replace(before, after)
            stale = self._serving.install(after)
            self._aside, self.installed = None, policy
        for checkpoint in stale:
            await asyncio.to_thread(remove_folder, checkpoint.folder)

    async def close(self) -> None:
        """End what was started; running replies fail."""
        self.installed = None
        await self._serving.close()

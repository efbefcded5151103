"""What a worker asks of whatever generates tokens.

Invariant (I5): ``installed`` changes only when the engine has switched its weights, and every completion names the
oldest and the newest policy that sampled one of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec

from echo2.data.task import Message
from echo2.types import FinishReason, Policy, Sampling


class ActivationMode(StrEnum):
    """What happens to running generations when the weights are switched."""

    DRAIN = "drain"
    """They finish under the policy they began with; new ones wait for the new policy."""
    CONTINUE = "continue"
    """They go on under the new policy, from recomputed caches; their completions span both."""
    ABORT = "abort"
    """They end with EngineError."""


class Completion(msgspec.Struct, frozen=True):
    """One reply of a group.

    Example: ``Completion((42, 2), (-0.1, -0.02), Policy(0, 4), Policy(0, 4), FinishReason.STOP)``.
    """

    token_ids: tuple[int, ...]
    """[L] exactly as sampled; a sampled end-of-turn token is the last one, and none is ever added."""
    logprobs: tuple[float, ...] | None
    """[L] over the full vocabulary at the sampling temperature; None where the engine has none."""
    policy_min: Policy
    policy_max: Policy
    finish_reason: FinishReason
    versions: tuple[int, ...] | None = None
    """[L] version of each token; None when one policy sampled them all."""


class Capabilities(msgspec.Struct, frozen=True):
    """What an engine can do; the conformance suite tests what it promises here and skips the rest by name."""

    logprobs: bool
    token_in: bool
    """Prompts are taken as token ids; an engine that only takes text re-tokenises and cannot promise I8."""
    modes: frozenset[ActivationMode]
    seeded: bool = True
    """The same seed gives the same tokens, whatever else is being generated."""
    top_p_logprobs: bool = True
    """With top-p below 1 log-probs are still over the whole vocabulary (PROTOCOL §4)."""
    restarts: bool = False
    """An install stops the server and starts it anew, which takes as long as that does."""
    fresh_caches: bool = True
    """``continue`` recomputes what the old weights had cached, so each token's log-prob is its version's own."""


Heard = Callable[[int, Completion], None]
"""Called in the event loop with (position, reply) as soon as a reply of a group has ended."""


class Engine(Protocol):
    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def installed(self) -> Policy | None:
        """The policy in force; None until the first ``activate`` (field report E11)."""
        ...

    @property
    def fault(self) -> str | None:
        """Why it cannot generate for now, in one sentence; None when it can. Cheap, and never raises."""
        ...

    async def mend(self) -> None:
        """Try once to be rid of the ``fault``, with the installed policy serving. Raises EngineError."""
        ...

    async def generate(
        self, token_ids: Sequence[int], sampling: Sampling, n: int, heard: Heard | None = None
    ) -> list[Completion]:
        """n replies to one prompt, in order; the same seed gives the same replies. Calls may overlap.

        Each reply is also told to ``heard`` when it ends, exactly once, before the call returns.
        Raises EngineError when nothing is installed, the prompt does not fit, or generation failed or was aborted
        (its message then begins with "aborted"). A cancelled call frees what it held.
        """
        ...

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        """Load a verified snapshot folder aside, while serving. Raises EngineError when it does not fit the model."""
        ...

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        """Switch to a prefetched policy and drop every cache. The one call that may pause generation.

        Raises EngineError, the old policy still serving, when ``policy`` was not prefetched.
        """
        ...

    async def close(self) -> None: ...


class Spoken(msgspec.Struct, frozen=True):
    """One reply of an engine that takes conversations."""

    text: str
    policy_min: Policy
    policy_max: Policy
    finish_reason: FinishReason


class SpeakingEngine(Engine, Protocol):
    """An engine whose ``token_in`` is False: a server that applies the chat template itself.

    ``generate`` raises EngineError. What tokens it fed and sampled is not known; whoever records its replies says so.
    """

    async def speak(self, messages: Sequence[Message], sampling: Sampling, n: int, *, thinking: bool) -> list[Spoken]:
        """n replies to one conversation, in order. Raises EngineError."""
        ...


def policy_span(policies: Sequence[Policy]) -> tuple[Policy, Policy, tuple[int, ...] | None]:
    """(oldest, newest, version of each token or None when all are the same) of a reply's [L] policies, L ≥ 1."""
    oldest, newest = min(policies), max(policies)
    versions = None if oldest == newest else tuple(policy.version for policy in policies)
    return oldest, newest, versions

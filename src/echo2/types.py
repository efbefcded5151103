"""The records that every plane and program shares.

Invariant: a trajectory is immutable data. It holds the exact token ids the engine was fed and sampled, the policy
versions that sampled them, and nothing that needs a task's code to be trained on (DESIGN I5, I8).

Token ids, log-probs and versions travel as packed little-endian arrays (``uint32``, ``float32``, ``uint32``): two bytes
of framing instead of up to five per number, and no rounding between worker and learner.
"""

from __future__ import annotations

import sys
from array import array
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

TOKEN_DTYPE = np.dtype("<u4")
LOGPROB_DTYPE = np.dtype("<f4")

LOGPROBS_FULL_VOCAB_AT_TEMPERATURE = "full-vocab@temperature"
"""Log-softmax over the whole vocabulary of logits divided by the sampling temperature; top-p is not renormalised."""

LARGEST_LOGPROB = 1e-3
"""Of a sampled token: rounding above 0."""
SMALLEST_LOGPROB = -9000.0
"""Of a sampled token, which has some probability; vLLM writes -9999 for what has none."""

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
"""A number that somebody else sent: exact in every reader, and in a database's signed 64 bits."""


class Policy(msgspec.Struct, frozen=True, order=True, array_like=True):
    """Which weights: ordered by incarnation, then version; never reused for other weights (I2).

    Example: ``Policy(0, 4)`` is the policy after four training steps of the first incarnation.
    """

    incarnation: Natural
    version: Natural

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.version}"


class FinishReason(StrEnum):
    """Why the policy stopped producing tokens; both are outcomes and are scored."""

    STOP = "stop"
    """The policy sampled an end-of-turn token (kept as the last sampled token) or the environment ended."""
    LENGTH = "length"
    """The reply was cut at the token limit; no end token is added."""


class RowStatus(StrEnum):
    """What became of one attempt at one trajectory on the worker."""

    FINISHED = "finished"
    ERROR = "error"
    TIMEOUT = "timeout"
    ABORTED = "aborted"

    @property
    def is_failure(self) -> bool:
        return self is not RowStatus.FINISHED


class RowState(StrEnum):
    """The one state of a row; the five sum to ``generated`` (I3)."""

    BUFFERED = "buffered"
    TRAINED = "trained"
    EXPIRED = "expired"
    REFUSED = "refused"
    FAILED = "failed"


class Verdict(StrEnum):
    """What the coordinator says of a submitted row. Verdicts are values: a refusal is an answer, not an error."""

    ACCEPTED = "accepted"
    STALE = "stale"
    FUTURE = "future"
    ORPHANED = "orphaned"
    DUPLICATE = "duplicate"
    MALFORMED = "malformed"
    NO_SIGNAL = "no_signal"
    DISTRUSTED = "distrusted"
    """Its worker was set aside before it was trained on."""
    FAILED = "failed"
    UNATTRIBUTED = "unattributed"
    """No such lease, or another worker's: counted outside the sum of I3."""


class Segment(msgspec.Struct, frozen=True, omit_defaults=True):
    """A run of consecutive tokens of one origin.

    A single-turn trajectory is two segments: the prompt (``sampled=False``) and the reply (``sampled=True``).
    """

    token_ids: bytes
    """[L] uint32, exactly as fed to or returned by the engine."""
    sampled: bool
    """True where the policy sampled the tokens: these and only these carry loss (I8)."""
    logprobs: bytes | None = None
    """[L] float32 of the sampled tokens in the record's convention; None where the engine has none."""
    versions: bytes | None = None
    """[L] uint32 policy version of each sampled token; None when the whole record has one version."""

    @property
    def tokens(self) -> NDArray[np.uint32]:
        """[L] uint32"""
        return np.frombuffer(self.token_ids, TOKEN_DTYPE)

    @property
    def logprob_values(self) -> NDArray[np.float32] | None:
        """[L] float32"""
        return None if self.logprobs is None else np.frombuffer(self.logprobs, LOGPROB_DTYPE)

    @property
    def version_values(self) -> NDArray[np.uint32] | None:
        """[L] uint32"""
        return None if self.versions is None else np.frombuffer(self.versions, TOKEN_DTYPE)


def pack_tokens(token_ids: Any) -> bytes:
    """[L] integers → packed uint32. Raises OverflowError for a negative or too large id."""
    if isinstance(token_ids, list | tuple):
        return _little_endian(array("I", token_ids))
    values = np.asarray(token_ids, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() > 0xFFFFFFFF):
        raise OverflowError(f"token ids must be in [0, 2**32), got {values.min()}..{values.max()}")
    return values.astype(TOKEN_DTYPE).tobytes()


def pack_logprobs(logprobs: Any) -> bytes:
    """[L] floats → packed float32."""
    if isinstance(logprobs, list | tuple):
        return _little_endian(array("f", logprobs))
    return np.asarray(logprobs, dtype=LOGPROB_DTYPE).tobytes()


def _little_endian(values: array[Any]) -> bytes:
    """A list of Python numbers is packed several times faster this way than through numpy."""
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


class Trajectory(msgspec.Struct, frozen=True, omit_defaults=True):
    """τ = (x, y, r, v, Ω): one rewarded episode (paper §4.1, §4.4)."""

    task: str
    prompt_id: str
    segments: tuple[Segment, ...]
    reward: float
    policy_min: Policy
    """Oldest policy that sampled a token of this record; admission uses it (I5)."""
    policy_max: Policy
    finish_reason: FinishReason
    temperature: float = 1.0
    top_p: float = 1.0
    logprob_convention: str | None = None
    """None when no segment carries log-probs."""
    normalisation_key: str | None = None
    """Advantages are normalised over records of one key; None means the lease group."""
    omega: dict[str, Any] = {}
    """Ω: whatever the objective or a report needs, msgpack types only."""

    @property
    def sampled_tokens(self) -> int:
        return sum(len(s.token_ids) // 4 for s in self.segments if s.sampled)


class Sampling(msgspec.Struct, frozen=True):
    """Every sampling field the engine gets; nothing is left to a model's own generation defaults (PROTOCOL §4)."""

    temperature: float
    top_p: float
    max_new_tokens: int
    seed: int
    stop_token_ids: tuple[int, ...] = ()


class Prompt(msgspec.Struct, frozen=True):
    """One item of a task: what the worker needs to run and score an episode."""

    prompt_id: str
    task: str
    content: dict[str, Any]
    """The task's own data (question, gold answer, environment seed …), msgpack types only."""


class SnapshotKind(StrEnum):
    ANCHOR = "anchor"
    DELTA = "delta"
    ADAPTER = "adapter"

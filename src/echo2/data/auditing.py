"""What audited log-probs say of each worker: noise, or other weights, another precision, another sampling.

Invariant: nobody is judged by a comparison with others, so a run of one worker and a run of liars are judged alike; and
nobody by its history, so a worker that turns is found as soon as one that always lied. Pure.

Three questions, each asked of a worker by betting against its honesty. A bet multiplies a stake by 1 + b·(x - m), where
x in [0, 1] is what was seen and an honest worker's x is m on average, or less. So honest bets lose or stay level on
average, however they are distributed and whatever the past was, and the chance that a stake begun at one row ever grows
``1 / ERROR``-fold is at most ERROR (Ville). A stake below 1 begins again at 1, which makes any row a beginning: in n
observations of an honest worker the chance of a false alarm is at most n·ERROR for each question. That holds where the
noise is as large as the tolerance; at half of it, a group takes two fifths of the stake away on average.

- *differ*: x is the mean |difference| over the tokens of one group, at most 1 nat; m is the tolerance. Groups of few
  tokens are bet on with less. No single group multiplies by more than 1 + 0.9·(1 - m)/m, so at the default tolerance
  seven groups are the least that convict, which is what another model takes; half a nat takes ten.
- *likelier*, *unlikelier*: the mean of log-prob + entropy over blocks of tokens, under the version's weights alone, is
  0 for tokens that were drawn from it. It is positive for a lower temperature, top-k or greedy choice and negative for
  other weights, also when the reported log-probs are right. The tolerance covers what the choice of rows does to it
  (replies that took too long never come). At the default tolerance thirty blocks are the least that convict.

Where groups without signal are dropped, the rows that are left were chosen by their rewards: of a policy that nearly
always succeeds they show the failures, which are less likely tokens by more than any tolerance. There *unlikelier* is
not asked; *likelier* is, because such a choice favours what is rare.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from echo2.metrics import Mismatch
from echo2.transport.messages import AUDIT_EDGES_NATS, RowAudit

ERROR = 1e-6
"""Largest chance that one observation begins a false alarm."""
DARING = 0.9
"""Share of the stake that the largest loss costs."""
MOST_NATS = 1.0
"""A group's mean difference counts as no more."""
FULL_TOKENS = 32
"""Groups of fewer tokens are weaker evidence."""
BLOCK_TOKENS = 256
MOST_EXCESS_NATS = 0.5
"""A block's mean log-prob + entropy counts as no more, either way."""
BEYOND_NATS = 0.5
"""Tokens that differ by more are told apart in the metrics."""
MOST_TOLD = 64
"""Workers in a metrics line: those that differ most."""


@dataclass
class Stake:
    """The logarithm of what a bet against honesty is worth."""

    honest: float
    """m: the largest mean of an honest worker's x."""
    log: float = 0.0

    def bet(self, seen: float, weight: float = 1.0) -> bool:
        """seen: x in [0, 1].  weight: in [0, 1].  Returns whether it is won."""
        self.log = max(0.0, self.log) + math.log1p(DARING / self.honest * weight * (seen - self.honest))
        return self.log >= -math.log(ERROR)


@dataclass
class Standing:
    """What is known of one worker."""

    tolerance: float
    groups_chosen: bool = False
    """Only groups with different rewards are seen."""
    groups: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * (len(AUDIT_EDGES_NATS) + 1))
    total: float = 0.0
    largest: float = 0.0
    excess: float = 0.0
    excess_tokens: int = 0

    def __post_init__(self) -> None:
        centred = 0.5 + self.tolerance / (2 * MOST_EXCESS_NATS)
        self._differ = Stake(self.tolerance / MOST_NATS)
        self._likelier, self._unlikelier = Stake(centred), Stake(centred)
        self._block, self._block_tokens = 0.0, 0

    @property
    def tokens(self) -> int:
        return sum(self.bins)

    def add(self, audits: Sequence[RowAudit]) -> str:
        """Of rows of one group. Returns why the worker is not to be believed; empty while it may be."""
        tokens = sum(audit.tokens for audit in audits)
        if not tokens:
            return ""
        total = math.fsum(audit.total for audit in audits)
        self.groups += 1
        self.total += total
        self.largest = max(self.largest, *(audit.largest for audit in audits))
        for audit in audits:
            self.bins = [sum(pair) for pair in zip(self.bins, audit.bins, strict=True)]
            if audit.excess is not None:
                self.excess += audit.excess
                self.excess_tokens += audit.tokens
                self._block += audit.excess
                self._block_tokens += audit.tokens
        if not self.tolerance:
            return ""
        if self._differ.bet(min(total / tokens / MOST_NATS, 1.0), min(tokens / FULL_TOKENS, 1.0)):
            return self._told(
                f"differ by {self.total / self.tokens:.2g} nats a token from those of the weights that it names"
            )
        return self._judge_block()

    def _judge_block(self) -> str:
        if self._block_tokens < BLOCK_TOKENS:
            return ""
        mean = self._block / self._block_tokens
        self._block, self._block_tokens = 0.0, 0
        seen = 0.5 + min(max(mean / MOST_EXCESS_NATS, -1.0), 1.0) / 2
        likelier = self._likelier.bet(seen)
        unlikelier = not self.groups_chosen and self._unlikelier.bet(1.0 - seen)
        if not (likelier or unlikelier):
            return ""
        off = self.excess / max(self.excess_tokens, 1)
        return self._told(
            f"are of tokens that the weights it names do not draw so: {abs(off):.2g} nats a token "
            f"{'likelier' if likelier else 'less likely'} than they draw"
        )

    def _told(self, what: str) -> str:
        return f"its log-probs {what}, in {self.groups} groups of {self.tokens:,} tokens; {self.tolerance:g} is allowed"

    def mismatch(self, name: str) -> Mismatch:
        """So far; a p99 is the upper end of its bin."""
        beyond = sum(self.bins[AUDIT_EDGES_NATS.index(BEYOND_NATS) + 1 :])
        return Mismatch(
            name=name,
            groups=self.groups,
            tokens=self.tokens,
            mean_nats=self.total / self.tokens,
            p99_nats=min(self._quantile(0.99), self.largest),
            beyond_share=beyond / self.tokens,
            excess_nats=self.excess / self.excess_tokens if self.excess_tokens else None,
        )

    def _quantile(self, share: float) -> float:
        below = 0
        for count, edge in zip(self.bins, (*AUDIT_EDGES_NATS, math.inf), strict=True):
            below += count
            if below >= share * self.tokens:
                return edge
        return math.inf


class Audits:
    """The standings of all workers, in this life of the coordinator: what a worker did before is soon seen again."""

    def __init__(self, tolerance: float, *, groups_chosen: bool = False) -> None:
        """tolerance: nats per token; 0 convicts nobody.  groups_chosen: groups without signal are dropped."""
        self._tolerance = tolerance
        self._groups_chosen = groups_chosen
        self._standings: dict[str, Standing] = {}
        self._convicted: dict[str, str] = {}

    def add(self, worker_id: str, audits: Sequence[RowAudit]) -> None:
        """Of rows of one group."""
        standing = self._standings.setdefault(worker_id, Standing(self._tolerance, self._groups_chosen))
        if reason := standing.add(audits):
            self._convicted.setdefault(worker_id, reason)

    def take_convicted(self) -> dict[str, str]:
        """Reasons by worker id, of who was found out since the last call."""
        found, self._convicted = self._convicted, {}
        return found

    def told(self, names: dict[str, str]) -> dict[str, Mismatch]:
        """By worker id, of at most ``MOST_TOLD``; names: of workers that are known."""
        told = {
            worker_id: standing.mismatch(names.get(worker_id, worker_id))
            for worker_id, standing in self._standings.items()
            if standing.tokens
        }
        worst = sorted(told, key=lambda worker_id: (-told[worker_id].mean_nats, worker_id))[:MOST_TOLD]
        return {worker_id: told[worker_id] for worker_id in sorted(worst)}

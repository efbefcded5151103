"""Whose turn it is with weights that a learner and an engine share.

Invariant: tokens are sampled only under a policy that was settled, and weights change only while nothing is sampled. So
every token of a reply is of one version, exactly the one that it names. Pure.

    TRAINING ──settle(v)──▶ GENERATING ──ask──▶ ENDING ──emptied──▶ TRAINING ──settle(v + 1)──▶ GENERATING …
        └── begins here: a warm start or a resume comes first
"""

from __future__ import annotations

from enum import StrEnum

from echo2.types import Policy


class Turn(StrEnum):
    GENERATING = "generating"
    """The engine begins replies, and goes on with them."""
    ENDING = "ending"
    """The learner waits: replies that have begun end under the policy they began with, none begins."""
    TRAINING = "training"
    """The weights are the learner's to change."""


class Alternation:
    def __init__(self) -> None:
        self.turn = Turn.TRAINING
        self.policy: Policy | None = None
        """Settled last; None before the first."""

    @property
    def may_begin(self) -> bool:
        """A reply may begin."""
        return self.turn is Turn.GENERATING

    @property
    def may_sample(self) -> bool:
        """A reply that has begun may grow."""
        return self.turn is not Turn.TRAINING

    def ask(self) -> bool:
        """The learner wants the weights; whether it has to wait for ``emptied``."""
        if self.turn is Turn.GENERATING:
            self.turn = Turn.ENDING
        return self.turn is Turn.ENDING

    def emptied(self) -> None:
        """Every reply that had begun has ended."""
        self._require(Turn.ENDING)
        self.turn = Turn.TRAINING

    def settle(self, policy: Policy) -> None:
        """The learner is done: the weights are ``policy`` from now on."""
        self._require(Turn.TRAINING)
        if self.policy is not None and policy <= self.policy:
            raise RuntimeError(f"policy {policy} must be newer than {self.policy}, which the same weights were")
        self.turn, self.policy = Turn.GENERATING, policy

    def _require(self, turn: Turn) -> None:
        if self.turn is not turn:
            raise RuntimeError(f"the weights must be {turn.value}, they are {self.turn.value}")

"""One line per training step: what happened, in numbers.

Invariant (I3): in every line ``generated == trained + expired + refused + buffered + failed``; the five are read at one
moment, together with ``generated``, and never retreat (``buffered`` excepted).
"""

from __future__ import annotations

import msgspec


class Traffic(msgspec.Struct, frozen=True):
    """What the coordinator's relay last told about how objects travel."""

    predicted_s: float | None = None
    """Of the newest object's plan, for the share 1/gamma of the relays."""
    bound_s: float | None = None
    """No plan could be faster at the measured rates."""
    seed_sent_bytes: int = 0
    """Since the coordinator started."""
    sent_bytes_by_node: dict[str, int] = {}
    """By each worker's relay to others, by worker id."""
    reparentings: int = 0


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's behaviour log-probs against the learner's, for the version that each row names; in nats per token."""

    name: str
    groups: int
    """Looked at, since the coordinator started."""
    tokens: int
    mean_nats: float
    """Of |difference|."""
    p99_nats: float
    """Upper end of the bin that holds it."""
    beyond_share: float
    """Share of the tokens that differ by more than half a nat."""
    excess_nats: float | None = None
    """Mean log-prob + entropy under the version's weights: 0 for tokens drawn as stated. None where top-p is below
    1."""


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A line of ``metrics.jsonl``, written once per step, after everything it counts is durable."""

    step: int
    """Index t of the training step, from 0."""
    policy_incarnation: int
    wall_time: float
    """Seconds since the epoch, for people."""
    elapsed_s: float
    """Seconds of running since the run began, restarts excluded."""

    reward_mean: float
    """Mean reward of all rows judged since the previous line, trained or not; of the batch when there were none."""
    reward_trained_mean: float
    """Mean reward of the batch."""
    reward_by_task: dict[str, float]
    """The same as ``reward_mean`` for each task of the run."""
    rows_by_task: dict[str, int] = {}
    """Rows that these means are over."""
    pass_share_by_task: dict[str, float] = {}
    """Share of them that pass, of tasks that say what passes."""

    staleness_min: int
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    """Trajectories of the batch by t - v."""
    staleness_bound: float | None
    """Planned bound, equation (7); None until T_train, T_bcast and the pool rate were measured."""
    staleness_bound_tight: float | None
    """Planned bound, equation (12)."""

    bubble_ratio: float
    """Learner's idle / (idle + training) since the start of the run."""
    idle_s: float
    """Time this step waited for admissible trajectories."""
    t_train_s: float
    t_bcast_s: float | None
    """Of the newest completed publish: end of its step to the share 1/gamma of active workers installed."""
    mu_pool_per_s: float
    """Sum of the active workers' delivered trajectories per second."""
    mu_min_per_s: float | None
    """Required by equation (2) at the measured times; None while unknown or infeasible."""
    workers_active: int
    mu_min_overlapped_per_s: float | None = None
    """Required by (2'), where workers generate while a snapshot travels."""
    mu_target_per_s: float | None = None
    """gamma times what the chosen rule requires."""

    generated: int
    trained: int
    expired: int
    refused: int
    buffered: int
    failed: int
    refused_by: dict[str, int]
    """Cumulative refusals by verdict."""
    unattributed: int
    """Requests and rows that belong to no lease; outside the sum."""
    rescored: int = 0
    """Rewards that the coordinator scored again since the run began."""
    rescored_differing: int = 0
    """… of them, those that differ from what the worker sent."""
    rescoring_failed: int = 0
    """Replies that it could not score, or not in time: evidence of nothing."""
    set_aside: dict[str, str] = {}
    """Workers whose work is not taken any more, by id: name and reason."""
    audited: dict[str, Mismatch] = {}
    """Workers whose log-probs were compared, by id; of many, those that differ most."""
    groups_dropped: int
    zero_variance_groups: int
    """Of this batch."""

    length_mean: float
    """Sampled tokens per trajectory of the batch."""
    truncated_share: float
    """Share of the batch cut at the token limit."""
    expired_length_mean: float | None = None
    """Sampled tokens per expired trajectory, of all so far; above ``length_mean`` it is the long replies that age
    out."""

    cost_usd: float
    """Of workers and learner since the run began, restarts included."""
    usd_per_h: float
    step_cost_usd: float = 0.0
    """Spent since the line before."""
    cost_usd_by_name: dict[str, float] = {}
    """Of ``cost_usd``: by machine of a pool, by name of a worker that joined by itself, and ``learner``."""
    snapshot_bytes: int
    """Size of the newest published snapshot, decoded."""
    publish_bytes: int = 0
    """Size of the object that its publish sent: a delta, or an anchor."""
    delta_share: float | None = None
    """Share of the publishes since the run began that were sent as deltas."""
    changed_share: float | None = None
    """Share of the elements that differ from the version before, as the newest delta says."""
    t_bcast_predicted_s: float | None = None
    """By the plan of the newest object: when the share 1/gamma of the relays has it."""
    t_bcast_bound_s: float | None = None
    """No plan could be faster at the measured rates."""
    seed_sent_bytes: int = 0
    """What the coordinator's relay has sent since the coordinator started."""
    sent_bytes_by_node: dict[str, int] = {}
    """What each worker's relay has sent to others since it started, by worker id."""
    reparentings: int = 0
    """Times a relay turned to another parent since the coordinator started."""

    learner: dict[str, float]
    """The learner's own statistics: loss, kl, entropy, clip_share, ratio_mean, grad_norm, trainable_tokens, lr …"""
    eval_reward: float | None = None
    """Mean held-out reward when an evaluation ended since the previous line."""
    eval_version: int | None = None

    @property
    def mismatch_mean_nats(self) -> float | None:
        """Of the worker that differs most."""
        return max((mismatch.mean_nats for mismatch in self.audited.values()), default=None)

    @property
    def workers_set_aside(self) -> int:
        return len(self.set_aside)

    @property
    def workers_sent_bytes(self) -> int:
        """What workers' relays together have sent to others: 0 in a star."""
        return sum(self.sent_bytes_by_node.values())

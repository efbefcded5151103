"""Measured times and rewards, and the metrics line made from them.

Invariant (I3): a line takes all its counts from the buffer at one moment, so they add up in every line.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypedDict

from echo2.broadcast.shelf import Published
from echo2.config.root import Config
from echo2.coordinator.history import RunState
from echo2.data.buffer import Buffer
from echo2.data.groups import Row
from echo2.metrics import Mismatch, StepMetrics, Traffic
from echo2.provisioning import capacity, demand
from echo2.provisioning.demand import Cadence, Times
from echo2.provisioning.offers import received_gb_per_h
from echo2.types import RowState

STEPS_IN_MEDIAN = 5
"""T_train is the median of so many steps (paper §5.1)."""
PUBLISHES_IN_MEDIAN = 5
"""One slow publish (a whole snapshot, a worker that stalls) asks for no more machines."""


class Required(NamedTuple):
    """Trajectories per second."""

    paper_per_s: float | None = None
    """Equation (2)."""
    overlapped_per_s: float | None = None
    """Equation (2′)."""
    target_per_s: float | None = None
    """gamma times the chosen rule's."""


class Scoreboard:
    def __init__(self, config: Config, pass_rewards: Mapping[str, float] = {}) -> None:
        """pass_rewards: from which a row of a task passes, of tasks that know."""
        self.config = config
        self._pass_rewards = pass_rewards
        self._train_times: deque[float] = deque(maxlen=STEPS_IN_MEDIAN)
        self.t_train_s: float | None = None
        self._is_resumed = False
        """Its first T_train is of an earlier life, and a median already."""
        self._judged: list[tuple[str, float]] = []
        """(task, reward) of rows judged since the last line."""
        self._bcast_times: deque[float] = deque(maxlen=PUBLISHES_IN_MEDIAN)
        self.usual_t_bcast_s: float | None = None
        """What is planned by. Of two, the shorter: the first publish is a whole snapshot, those after it are deltas."""
        self._cadence = Cadence(config.staleness_budget, config.publish_period)
        self.snapshot_bytes = 0
        self.traffic = Traffic()
        self._publish_sizes: deque[int] = deque(maxlen=PUBLISHES_IN_MEDIAN)
        self._changed_share: float | None = None
        self._eval: tuple[int, float] | None = None

    def resume(self, last: StepMetrics) -> None:
        """Go on from the line an earlier life wrote last: its times hold until they are measured again."""
        self.trained(last.t_train_s)
        self._is_resumed = True
        if last.t_bcast_s is not None:
            self.disseminated(last.t_bcast_s)
        self.snapshot_bytes = last.snapshot_bytes
        self._publish_sizes.append(last.publish_bytes)
        self._changed_share = last.changed_share

    def published(self, published: Published) -> None:
        self.snapshot_bytes = published.raw_bytes
        self._publish_sizes.append(published.entry.size_bytes)
        self._changed_share = published.changed_share

    def judged(self, task: str, rewards: Sequence[float]) -> None:
        self._judged.extend((task, reward) for reward in rewards)

    def evaluated(self, version: int, reward: float) -> None:
        self._eval = (version, reward)

    def trained(self, t_train_s: float) -> None:
        self._train_times.append(t_train_s)
        self.t_train_s = statistics.median(self._train_times)

    def disseminated(self, t_bcast_s: float) -> None:
        self._bcast_times.append(t_bcast_s)
        self.usual_t_bcast_s = statistics.median_low(self._bcast_times)

    @property
    def t_bcast_s(self) -> float | None:
        """Of the newest publish that arrived."""
        return self._bcast_times[-1] if self._bcast_times else None

    @property
    def profiled_t_train_s(self) -> float | None:
        """None until so many steps were measured that machines can be rented for it, and while they take no time."""
        known = self._is_resumed or len(self._train_times) >= STEPS_IN_MEDIAN
        return (self.t_train_s or None) if known else None

    @property
    def received_gb_per_h(self) -> float:
        """What a worker receives, by the last publishes; 0 until T_train is known."""
        if not self.t_train_s or not self._publish_sizes:
            return 0.0
        return received_gb_per_h(
            bytes_per_publish=statistics.fmean(self._publish_sizes),
            t_train_s=self.t_train_s,
            publish_period=self.config.publish_period,
        )

    def _times(self, t_gen_s: float | None) -> Times | None:
        if not self.t_train_s or self.t_bcast_s is None:
            return None
        return Times(
            t_train_s=self.t_train_s,
            t_bcast_s=self.usual_t_bcast_s or 0.0,
            t_gen_s=t_gen_s or 0.0,
            rollouts_per_step=self.config.rollout.rollouts_per_step,
        )

    def bound_tight(self) -> float | None:
        """Equation (12) at the measured times."""
        times = self._times(None)
        if times is None:
            return None
        return capacity.staleness_bound_tight(
            t_train_s=times.t_train_s, t_bcast_s=times.t_bcast_s, publish_period=self.config.publish_period
        )

    def planned_staleness(self, t_gen_s: float | None) -> float | None:
        """Equation (12) with the time to finish a group: how far ahead of the learner the pool has to work."""
        times = self._times(t_gen_s)
        if times is None:
            return None
        return capacity.staleness_bound_tight(
            t_train_s=times.t_train_s,
            t_bcast_s=times.t_bcast_s,
            publish_period=self.config.publish_period,
            t_gen_s=times.t_gen_s,
        )

    def _bound(self, mu_pool_per_s: float) -> float | None:
        times = self._times(None)
        if times is None or mu_pool_per_s <= 0:
            return None
        return demand.staleness_bounds(times, self._cadence, mu_pool_per_s)[0]

    def required(self, t_gen_s: float | None) -> Required:
        """By both rules, and the target; None where not known yet, and where no pool would be enough."""
        times = self._times(t_gen_s)
        if times is None:
            return Required()
        paper = _feasible(lambda: demand.paper_rate(times, self._cadence))
        overlapped = _feasible(lambda: demand.overlapped_rate(times, self._cadence)) if t_gen_s is not None else None
        provisioning = self.config.provisioning
        chosen = paper if provisioning.rule == "paper" else overlapped
        return Required(paper, overlapped, None if chosen is None else provisioning.gamma * chosen)

    def _by_task(self, judged: Sequence[tuple[str, float]]) -> _ByTask:
        by_task: dict[str, list[float]] = {}
        for task, reward in judged:
            by_task.setdefault(task, []).append(reward)
        known = sorted(by_task.items())
        return _ByTask(
            reward_by_task={task: statistics.fmean(rewards) for task, rewards in known},
            rows_by_task={task: len(rewards) for task, rewards in known},
            pass_share_by_task={
                task: statistics.fmean(reward >= self._pass_rewards[task] for reward in rewards)
                for task, rewards in known
                if task in self._pass_rewards
            },
        )

    def line(
        self,
        *,
        step: int,
        state: RunState,
        buffer: Buffer,
        idle_s: float,
        t_train_s: float,
        learner: Mapping[str, float],
        wall_time: float,
        mu_pool_per_s: float,
        workers_active: int,
        usd_per_h: float,
        step_cost_usd: float,
        cost_usd_by_name: Mapping[str, float],
        t_gen_s: float | None,
        set_aside: Mapping[str, str] = {},
        audited: Mapping[str, Mismatch] = {},
    ) -> StepMetrics:
        """The line of a step just reported; starts the next one."""
        rows = buffer.batch_rows(buffer.batches[step])
        task_of = {row.group_id: buffer.groups[row.group_id].prompt.task for row in rows}
        of_batch = [(task_of[row.group_id], row.reward or 0.0) for row in rows]
        judged, self._judged = self._judged or of_batch, []
        evaluated, self._eval = self._eval, None
        staleness = [step - row.policy.version for row in rows]
        counts, required = buffer.counts, self.required(t_gen_s)
        return StepMetrics(
            step=step,
            policy_incarnation=state.incarnation,
            wall_time=wall_time,
            elapsed_s=state.elapsed_s,
            reward_mean=statistics.fmean(reward for _, reward in judged),
            reward_trained_mean=statistics.fmean(reward for _, reward in of_batch),
            **self._by_task(judged),
            staleness_min=min(staleness),
            staleness_mean=statistics.fmean(staleness),
            staleness_max=max(staleness),
            staleness_histogram={str(k): v for k, v in sorted(Counter(staleness).items())},
            staleness_bound=self._bound(mu_pool_per_s),
            staleness_bound_tight=self.bound_tight(),
            bubble_ratio=capacity.bubble_ratio(idle_s=state.idle_s, training_s=state.training_s),
            idle_s=idle_s,
            t_train_s=t_train_s,
            t_bcast_s=self.t_bcast_s,
            mu_pool_per_s=mu_pool_per_s,
            mu_min_per_s=required.paper_per_s,
            mu_min_overlapped_per_s=required.overlapped_per_s,
            mu_target_per_s=required.target_per_s,
            workers_active=workers_active,
            generated=buffer.generated,
            trained=counts[RowState.TRAINED],
            expired=counts[RowState.EXPIRED],
            refused=counts[RowState.REFUSED],
            buffered=counts[RowState.BUFFERED],
            failed=counts[RowState.FAILED],
            refused_by={str(k): v for k, v in sorted(buffer.refused_by.items())},
            unattributed=state.unattributed,
            rescored=state.rescored,
            rescored_differing=state.rescored_differing,
            rescoring_failed=state.rescoring_failed,
            set_aside=dict(set_aside),
            audited=dict(audited),
            groups_dropped=buffer.groups_dropped,
            zero_variance_groups=_zero_variance_groups(rows),
            length_mean=statistics.fmean(row.tokens for row in rows),
            truncated_share=statistics.fmean(row.truncated for row in rows),
            expired_length_mean=_expired_length_mean(buffer),
            cost_usd=state.cost_usd,
            usd_per_h=usd_per_h,
            step_cost_usd=step_cost_usd,
            cost_usd_by_name=dict(cost_usd_by_name),
            snapshot_bytes=self.snapshot_bytes,
            publish_bytes=self._publish_sizes[-1] if self._publish_sizes else 0,
            delta_share=state.deltas / state.publishes if state.publishes else None,
            changed_share=self._changed_share,
            t_bcast_predicted_s=self.traffic.predicted_s,
            t_bcast_bound_s=self.traffic.bound_s,
            seed_sent_bytes=self.traffic.seed_sent_bytes,
            sent_bytes_by_node=self.traffic.sent_bytes_by_node,
            reparentings=self.traffic.reparentings,
            learner=dict(learner),
            eval_version=evaluated[0] if evaluated else None,
            eval_reward=evaluated[1] if evaluated else None,
        )


class _ByTask(TypedDict):
    reward_by_task: dict[str, float]
    rows_by_task: dict[str, int]
    pass_share_by_task: dict[str, float]


def _feasible(rate: Callable[[], float]) -> float | None:
    try:
        return rate()
    except capacity.Infeasible:
        return None


def _expired_length_mean(buffer: Buffer) -> float | None:
    expired = buffer.counts[RowState.EXPIRED]
    return buffer.expired_tokens / expired if expired else None


def _zero_variance_groups(rows: Sequence[Row]) -> int:
    rewards: dict[int, set[float | None]] = {}
    for row in rows:
        rewards.setdefault(row.group_id, set()).add(row.reward)
    return sum(1 for found in rewards.values() if len(found) == 1)

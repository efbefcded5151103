"""The coordinator's state, held in one place, and what of it must become durable.

Invariant: whoever changes state here leaves the matching operations in ``drain()``. Nobody is answered before they are
durable; the program sees to it.

Pure: time enters as a number, identifiers come from a port, prompts from a pure cursor.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from echo2.config.root import Config
from echo2.coordinator.evaluation import Evaluation
from echo2.coordinator.fleet import Fleet
from echo2.coordinator.history import RunState
from echo2.coordinator.operations import EvalPut, Loaded, Operation, RunPut
from echo2.coordinator.outcasts import Outcasts
from echo2.coordinator.publishing import Publishing
from echo2.coordinator.scoreboard import Scoreboard
from echo2.data.admission import Asked
from echo2.data.auditing import Audits
from echo2.data.buffer import Buffer, BufferRules
from echo2.data.cursor import PromptCursor
from echo2.data.rescoring import Docket
from echo2.errors import TaskFault
from echo2.ports import EventLog, Ids
from echo2.provisioning.ledger import Ledger
from echo2.transport.messages import AssetFile
from echo2.types import Policy, Prompt

BEFORE_RESTART = "before a restart"
"""What was spent between a step and the end of the coordinator's life, whoever it was spent on."""


MOST_PASSED_OVER = 100
"""Prompts in a row that their task could not give; after so many, it will give none."""


class Books:
    """Everything the two desks decide from and write into."""

    def __init__(
        self, config: Config, loaded: Loaded, fresh_run_id: str, prompts: PromptCursor, ids: Ids, events: EventLog
    ) -> None:
        self.config = config
        self.prompts = prompts
        self.ids = ids
        self.events = events
        self.state = loaded.state or RunState(run_id=fresh_run_id)
        self.assets: tuple[AssetFile, ...] = loaded.assets
        self.buffer = Buffer(_rules(config), self.state.judge)
        self.fleet = Fleet(
            config.coordinator.dead_after_s,
            config.coordinator.lease_max_s,
            config.workers.usd_per_h,
            config.rollout.concurrent_groups,
        )
        self.scoreboard = Scoreboard(config, _pass_rewards(prompts))
        self.publishing = Publishing(config.provisioning.gamma)
        self.outcasts = Outcasts(loaded.outcasts)
        self.state.secret = self.state.secret or ids.new("secret")
        self.docket = Docket(prompts.tasks, config.coordinator.rescored_share, self.state.secret)
        self.audits = Audits(config.coordinator.logprob_tolerance, groups_chosen=config.buffer.drop_zero_variance)
        self.evaluation: Evaluation | None = None
        self.bill = Ledger(settled_usd=self.state.cost_usd, told_usd=self.state.cost_usd)
        self.learner_waits = False
        self.learner_attached = False
        self.learner_left = False
        """It said so, after its last publish."""
        if self.state.steps_reported < config.run.steps:
            self.state.finished = False  # Resumed with more steps than before.
            self.stop_reason = ""
        else:
            # Also when an earlier life died between the last step and the end.
            self.stop_reason = "the run has ended" if self.state.finished else "the last step is trained"
        self.draining = self.state.finished
        self.counted_s = 0.0
        """Until when earlier lives counted what was spent, on this one's clock."""
        self._elapsed_until: float | None = None
        self._written = b""
        self._operations: list[Operation] = []
        self._restore(loaded)

    def _restore(self, loaded: Loaded) -> None:
        buffer, state = self.buffer, self.state
        buffer.next_batch, buffer.next_group = state.next_batch, state.next_group
        buffer.restore(loaded.groups, loaded.rows, state.next_batch)
        buffer.batches = {batch.step: batch for batch in loaded.batches}
        buffer.records_from = max(state.checkpoint_step, 0)
        buffer.counts.update(loaded.counts)
        buffer.generated = sum(loaded.counts.values())
        buffer.refused_by.update(loaded.refused_by)
        buffer.groups_dropped, buffer.expired_tokens = state.groups_dropped, state.expired_tokens

    def drain(self) -> list[Operation]:
        """What must become durable, in order; empty when nothing changed."""
        state = self.state
        state.next_batch, state.next_group = self.buffer.next_batch, self.buffer.next_group
        state.groups_dropped, state.expired_tokens = self.buffer.groups_dropped, self.buffer.expired_tokens
        operations: list[Operation] = [*self.buffer.drain_changes(), *self._operations]
        self._operations = []
        written = msgspec.msgpack.encode(state)
        if written != self._written:
            self._written = written
            operations.append(RunPut(msgspec.msgpack.decode(written, type=RunState)))
        return operations

    # ---- prompts -----------------------------------------------------------------------------------------------

    def next_prompt(self) -> Prompt:
        """The prompt at the cursor, which moves on. Those that their task cannot give are passed over and told: one bad
        row costs its group, not the run. Raises TaskFault when there are only such."""
        failed: TaskFault | None = None
        for _ in range(MOST_PASSED_OVER):
            position = self.state.cursor
            self.state.cursor += 1
            try:
                return self.prompts.prompt(position)
            except TaskFault as fault:
                failed = fault
                self.events.emit("prompt_passed_over", position=position, error=str(fault))
        assert failed is not None, "the loop ran"
        raise failed

    # ---- time and money -----------------------------------------------------------------------------------------

    def begin(self, now: float, wall: float) -> None:
        """A life of the coordinator begins. How long ago the one before counted last only the wall clock can say."""
        state = self.state
        away_s = 0.0 if state.clock_offset_s is None else max(0.0, wall - state.accounted_s - state.clock_offset_s)
        self.counted_s = state.accounted_s = now - away_s
        state.clock_offset_s = wall - now

    def account(self, now: float) -> None:
        """Bring elapsed time and cost up to ``now``."""
        if self._elapsed_until is not None:
            self.state.elapsed_s += now - self._elapsed_until
        self._elapsed_until = self.state.accounted_s = now
        self.state.cost_usd = self.bill.total_usd(now)

    def resume_bill(self, costs_usd: Mapping[str, float]) -> None:
        """After a restart: who an earlier life spent on, as far as its last line said."""
        unattributed = max(0.0, self.state.cost_usd - math.fsum(costs_usd.values()))
        self.bill = Ledger(unattributed, ended_usd=dict(costs_usd), told_usd=self.state.cost_usd)

    def costs_usd(self, now: float) -> dict[str, float]:
        """By machine of a pool, by name of a worker that joined by itself, and ``learner``."""
        costs: dict[str, float] = defaultdict(float)
        for key, usd in self.bill.by_name_usd(now).items():
            worker = self.fleet.workers.get(key)
            costs[key if worker is None else worker.name] += usd
        if self.bill.settled_usd > 0:
            costs[BEFORE_RESTART] += self.bill.settled_usd
        return {name: costs[name] for name in sorted(costs)}

    @property
    def over_budget(self) -> bool:
        cap = self.config.provisioning.budget_usd
        return cap > 0 and self.state.cost_usd >= cap

    @property
    def all_steps_reported(self) -> bool:
        return self.state.steps_reported >= self.config.run.steps

    def request_stop(self, reason: str) -> None:
        """End the run in order: the learner stops after its current step, then workers drain."""
        if not self.stop_reason:
            self.stop_reason = reason or "stopped by the operator"
            self.events.emit("stop_requested", reason=self.stop_reason)

    # ---- shared by both desks -----------------------------------------------------------------------------------

    def note_installs(self, now: float) -> None:
        """A worker installed, came or went: the newest publish may be complete."""
        done = self.publishing.arrived(self.fleet.installed, now)
        if done is not None:
            policy, seconds = done
            self.scoreboard.disseminated(seconds)
            self.events.emit("disseminated", policy=str(policy), t_bcast_s=seconds)

    def start_publish(self, policy: Policy, now: float) -> None:
        """The step that made ``policy`` ended."""
        generating = [worker for worker in self.fleet.active() if worker.installed is not None and not worker.draining]
        self.publishing.start(policy, {worker.worker_id: worker.estimate(now).mean_per_s for worker in generating}, now)

    def finish_evaluation(self) -> None:
        """Report the evaluation if it is over."""
        evaluation = self.evaluation
        if evaluation is None or not evaluation.is_over(self.fleet.installed):
            return
        self.evaluation = None
        line = evaluation.line()
        if line is None:
            self.events.emit(
                "evaluation_missed", step=evaluation.step, why="every worker went on before a prompt was scored"
            )
        else:
            self.scoreboard.evaluated(line.version, line.reward_mean)
            self.record(EvalPut(line.step, msgspec.json.encode(line)))
            self.events.emit("evaluated", version=line.version, reward=line.reward_mean, prompts=line.prompts)

    def record(self, operation: Operation) -> None:
        self._operations.append(operation)

    def kept_policies(self) -> set[Policy]:
        """Snapshots that an admissible trajectory or a running lease may still name, and the newest."""
        running = [self.buffer.lease_of(x.group_id, x.attempt) for x in self.fleet.leases.values()]
        leases = {lease.policy for lease in running if lease is not None}
        oldest = self.buffer.oldest_admissible
        return leases | {p for p in self.state.published if p.version >= oldest or p == self.state.current}

    # ---- what people see ----------------------------------------------------------------------------------------

    def phase(self) -> str:
        if self.state.finished:
            return "done"
        if self.draining:
            return "draining"
        if self.stop_reason:
            return "ending"
        if not self.learner_attached:
            return "waiting for a learner"
        if self.state.current is None:
            return "waiting for version 0"
        if not self.fleet.active_count:
            gone = len(self.outcasts)
            return f"waiting for workers ({gone} set aside)" if gone else "waiting for workers"
        return "waiting for trajectories" if self.learner_waits else "training"


def _pass_rewards(prompts: PromptCursor) -> dict[str, float]:
    return {name: task.pass_reward for name, task in prompts.tasks.items() if task.pass_reward is not None}


def _rules(config: Config) -> BufferRules:
    return BufferRules(
        staleness_budget=config.staleness_budget,
        groups_per_batch=config.prompts_per_step,
        max_attempts=config.coordinator.max_attempts,
        order=config.buffer.order,
        drop_zero_variance=config.buffer.drop_zero_variance,
        max_zero_variance_drops=config.buffer.max_zero_variance_drops,
        asked=Asked(config.rollout.temperature, config.rollout.top_p),
    )

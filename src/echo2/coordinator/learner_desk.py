"""What the learner asks for: batches, and that its steps, checkpoints and snapshots count.

Invariant: batch t is formed once, after step t - 1 was reported; a report counts once; a version becomes visible only
after its checkpoint is durable.
"""

from __future__ import annotations

import math

import msgspec

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.shelf import Published
from echo2.coordinator import seat
from echo2.coordinator.auditing import audited, note_audits
from echo2.coordinator.books import Books
from echo2.coordinator.evaluation import Evaluation
from echo2.coordinator.operations import AssetsPut, MetricsDropped, MetricsPut
from echo2.data.groups import Batch
from echo2.errors import Refused
from echo2.metrics import StepMetrics
from echo2.transport.messages import Attach, Attached, ReportStep, StepAccepted
from echo2.types import Policy, SnapshotKind

SIZE_JUMP = 0.1
"""Share by which a snapshot may differ in size from the one before it without being remarked on: a silent change of
element type doubles the traffic (E12)."""


class LearnerDesk:
    def __init__(self, books: Books) -> None:
        self.books = books
        self._asked: tuple[int, float] = (-1, 0.0)
        """(step, time) when the learner first asked for a batch that could not be formed yet."""
        self._idle: tuple[int, float] = (-1, 0.0)
        """(step, seconds) that the batch formed last kept the learner waiting."""

    # ---- attaching ----------------------------------------------------------------------------------------------

    def attach(self, attach: Attach, missing_assets: tuple[str, ...], now: float) -> Attached:
        """Seat a learner; the one before it is fenced off. Raises Refused when histories do not match."""
        books, state = self.books, self.books.state
        if seat.check_attach(state, attach, books.buffer, books.config.checkpoint.every_publishes > 1):
            state.fork(attach.step)
            books.buffer.fork(attach.step)
            books.record(MetricsDropped(attach.step))
            books.events.emit("rollback", step=attach.step, incarnation=state.incarnation)
        state.epoch += 1
        state.initial_weights_hash = attach.initial_weights_hash
        if attach.assets != books.assets:
            books.assets = attach.assets
            books.record(AssetsPut(attach.assets))
        self._take_seat(now)
        policy = Policy(state.incarnation, attach.step)
        self._settle(policy)
        publish = (
            policy not in state.published
            and self._may_publish(policy)
            and (state.current is None or policy.incarnation > state.current.incarnation or self._due(attach.step - 1))
        )
        if publish:
            books.start_publish(policy, now)
        books.events.emit("learner_attached", epoch=state.epoch, step=attach.step)
        return Attached(
            epoch=state.epoch,
            policy=policy,
            missing_assets=missing_assets,
            publish_needed=publish,
            last_step_reported=state.steps_reported,
            stop_after_step=books.config.run.steps,
        )

    def heard(self, epoch: int, now: float) -> None:
        """A message under the newest epoch: who attached to an earlier life of this coordinator is still here."""
        books = self.books
        if epoch == books.state.epoch > 0 and not (books.learner_attached or books.learner_left):
            self._take_seat(books.counted_s)  # while nobody counted, it was paid for

    def _take_seat(self, since_s: float) -> None:
        books = self.books
        books.bill = books.bill.rent("learner", books.config.provisioning.learner_usd_per_h, since_s)
        books.learner_attached, books.learner_left = True, False

    def leave(self, epoch: int, now: float) -> None:
        """The learner has finished and goes. Raises Fenced when another one sits here now."""
        seat.check_epoch(self.books.state, epoch)
        self.books.learner_attached, self.books.learner_left = False, True
        self.books.learner_waits = False
        self.books.bill = self.books.bill.release("learner", now)
        self.books.events.emit("learner_left", step=self.books.state.steps_reported)

    # ---- batches and steps --------------------------------------------------------------------------------------

    def batch(self, epoch: int, step: int, now: float) -> Batch | str:
        """Batch ``step``, formed now if it can be; else what it waits for. Raises Refused for any other step."""
        books = self.books
        seat.check_epoch(books.state, epoch)
        formed = books.buffer.batches.get(step)
        if formed is not None and step >= books.buffer.records_from:
            return formed
        if step != books.buffer.next_batch or step != books.state.steps_reported:
            raise Refused(
                f"batch {books.buffer.next_batch} is next after {books.state.steps_reported} reported steps, got {step}"
            )
        if books.stop_reason or step >= books.config.run.steps:
            return "the run is ending"
        if self._asked[0] != step:
            self._asked = (step, now)
        formed = books.buffer.form_batch()
        if formed is None:
            return self.lacking()
        self._idle = (step, now - self._asked[1])
        books.events.emit("batch", step=step, digest=formed.digest, rows=len(formed.rows))
        return formed

    def lacking(self) -> str:
        """What the next batch waits for, as a sentence."""
        buffer = self.books.buffer
        return (
            f"batch {buffer.next_batch} has {buffer.ready_count} of {self.books.config.prompts_per_step} "
            f"groups, {len(self.books.fleet.leases)} are leased, {self.books.fleet.active_count} workers are active"
            + (f", {count} were set aside" if (count := len(self.books.outcasts)) else "")
        )

    def report(self, report: ReportStep, now: float, wall_time: float) -> tuple[StepAccepted, StepMetrics | None]:
        """Step t is trained. The line is None for a repeated report, which changes nothing."""
        books, state = self.books, self.books.state
        seat.check_epoch(state, report.epoch)
        if report.step > state.steps_reported or report.step not in books.buffer.batches:
            raise Refused(f"step {state.steps_reported} is next to be reported, got {report.step}")
        line = self._count(report, now, wall_time) if report.step == state.steps_reported else None
        policy = Policy(state.incarnation, report.step + 1)
        self._settle(policy)
        publish = self._due(report.step) and self._may_publish(policy)
        if publish and policy not in state.published:
            books.start_publish(policy, now)
        stop = report.step + 1 >= books.config.run.steps or bool(books.stop_reason)
        return StepAccepted(policy=policy, publish=publish, stop=stop), line

    def _count(self, report: ReportStep, now: float, wall_time: float) -> StepMetrics:
        books, state = self.books, self.books.state
        idle_s = self._idle[1] if self._idle[0] == report.step else 0.0
        books.buffer.report_step(report.step)
        state.steps_reported += 1
        state.idle_s += idle_s
        state.training_s += report.t_train_s
        note_audits(books, report)
        books.scoreboard.trained(report.t_train_s)
        books.account(now)
        books.bill, step_cost_usd = books.bill.step(now)
        line = books.scoreboard.line(
            step=report.step,
            state=state,
            buffer=books.buffer,
            idle_s=idle_s,
            t_train_s=report.t_train_s,
            learner={name: value for name, value in report.stats.items() if math.isfinite(value)},
            wall_time=wall_time,
            mu_pool_per_s=books.fleet.pool_rate_per_s(now),
            workers_active=books.fleet.active_count,
            usd_per_h=books.bill.usd_per_h,
            step_cost_usd=step_cost_usd,
            cost_usd_by_name=books.costs_usd(now),
            t_gen_s=books.fleet.usual_lease_s(),
            set_aside=books.outcasts.told(),
            audited=audited(books),
        )
        books.record(MetricsPut(report.step, msgspec.json.encode(line)))
        books.events.emit("step", step=report.step, reward=line.reward_mean, staleness_max=line.staleness_max)
        if books.over_budget:
            books.request_stop(f"the budget of {books.config.provisioning.budget_usd:g} USD is spent")
        self._evaluate_when_due(report.step)
        return line

    def _settle(self, policy: Policy) -> None:
        """Where the learner's device generates, it does so from now on with this version, published or not."""
        books = self.books
        if books.config.workers.shared_device:
            books.state.settle(policy)
            self._pin_evaluation(policy)

    def _pin_evaluation(self, policy: Policy) -> None:
        evaluation = self.books.evaluation
        if evaluation is not None and evaluation.policy is None:
            evaluation.policy = policy

    def _evaluate_when_due(self, step: int) -> None:
        books, plan = self.books, self.books.config.eval
        if plan.every_steps and (step + 1) % plan.every_steps == 0 and books.evaluation is None:
            prompts, asked = books.prompts.eval_prompts(plan.prompts), books.buffer.rules.asked
            books.evaluation = Evaluation(step, prompts, plan.samples, asked)

    # ---- checkpoints and snapshots ------------------------------------------------------------------------------

    def ack_checkpoint(self, epoch: int, step: int) -> None:
        """A checkpoint of ``step`` steps is durable."""
        state = self.books.state
        seat.check_epoch(state, epoch)
        if step > state.steps_reported:
            raise Refused(f"{state.steps_reported} steps are reported, a checkpoint of {step} is acknowledged")
        state.checkpoint_step = max(state.checkpoint_step, step)
        self.books.buffer.release_records(state.checkpoint_step)
        self.books.events.emit("checkpoint", step=step)

    def check_offer(self, epoch: int, manifest: Manifest) -> None:
        """Raises Refused for a snapshot that may not become visible, or that every worker would refuse."""
        self.check_publish(epoch, manifest.policy)
        run_id, dtype = self.books.state.run_id, self.books.config.model.snapshot_dtype
        if (manifest.run_id, manifest.dtype) != (run_id, dtype):
            raise Refused(
                f"a snapshot of this run is of {run_id} and {dtype}, got {manifest.run_id[:80]} and "
                f"{manifest.dtype[:32]}: start the learner on this run's folder"
            )

    def check_publish(self, epoch: int, policy: Policy) -> None:
        """Raises Refused unless ``policy`` may become visible now."""
        state = self.books.state
        seat.check_epoch(state, epoch)
        if policy.incarnation != state.incarnation or policy.version > state.steps_reported:
            raise Refused(f"policy {policy} is not of this history, which stands at {state.learner_policy}")
        if self.books.config.checkpoint.every_publishes == 1 and policy.version > state.checkpoint_step:
            raise Refused(f"policy {policy} must be checkpointed before it is published")
        if not self._may_publish(policy):
            raise Refused(f"policy {policy} is older than published {state.current}")

    def published(self, published: Published, now: float) -> None:
        """The snapshot, and the object that it travels as, are durable and signed."""
        books, policy = self.books, published.entry.policy
        if policy != books.state.current:
            books.state.publishes += 1
            books.state.deltas += published.entry.kind is SnapshotKind.DELTA
        books.state.publish(policy)
        size, before = published.raw_bytes, books.scoreboard.snapshot_bytes
        if before and abs(size - before) > SIZE_JUMP * before:
            books.events.emit("snapshot_size_changed", policy=str(policy), bytes=size, bytes_before=before)
        books.scoreboard.published(published)
        books.publishing.visible(policy, now)
        kind, sent = published.entry.kind.value, published.entry.size_bytes
        books.events.emit("published", policy=str(policy), bytes=size, sent_as=kind, sent_bytes=sent)
        self._pin_evaluation(policy)
        if books.config.workers.shared_device:
            books.note_installs(now)  # The learner's own engine had it before.

    def _due(self, step: int) -> bool:
        config = self.books.config
        return seat.publish_due(step, config.publish_period, config.run.steps, bool(self.books.stop_reason))

    def _may_publish(self, policy: Policy) -> bool:
        """Versions never go back."""
        current = self.books.state.current
        return current is None or policy >= current

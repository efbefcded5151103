from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from echo2.broadcast.manifest import Manifest
from echo2.errors import DiskFull, Fenced, IntegrityError, Refused, TransportError
from echo2.learner.program import LearnerOptions, LearnerProgram
from echo2.ports import Frozen
from echo2.simulation.clock import VirtualClock
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemoryDisk
from echo2.simulation.models import LearnerDisk, LearnerModel, ModelledLearner
from echo2.simulation.record import RecordedEvents
from echo2.simulation.snapshots import ModelledPacker
from echo2.transport.messages import (
    AUDIT_EDGES_NATS,
    AckCheckpoint,
    AssetFile,
    Attach,
    Attached,
    BatchReply,
    BatchWait,
    Done,
    Leave,
    OfferSnapshot,
    PublishSnapshot,
    Reply,
    ReportStep,
    Request,
    RequestBatch,
    RowAudit,
    SnapshotOffer,
    StepAccepted,
)
from echo2.types import Policy, SnapshotKind

ASSET = AssetFile("config.json", 2, "0" * 64)


class Desk:
    """A coordinator's learner side, reduced to a list of what was said, in order."""

    def __init__(self, steps: int = 4, publish_period: int = 2) -> None:
        self.steps = steps
        self.publish_period = publish_period
        self.said: list[str] = []
        self.published: list[Policy] = []
        self.received: dict[str, int] = {}
        self.sent: list[str] = []
        """Kinds of the objects that were published."""
        self.knows_bases = True
        self.faults: dict[str, list[Exception]] = {}
        self.stopping = False
        self.missing: tuple[str, ...] = ()
        self.audits: list[tuple[RowAudit, ...]] = []
        """Of each report."""
        self.stats: list[dict[str, float]] = []

    async def call(self, request: Request) -> Reply:
        await asyncio.sleep(0.01)
        name = type(request).__name__
        if self.faults.get(name):
            raise self.faults[name].pop(0)
        answers: dict[type[Request], Callable[[], Reply]] = {
            Attach: lambda: self._attach(request),  # type: ignore[arg-type]
            RequestBatch: lambda: self._batch(request),  # type: ignore[arg-type]
            ReportStep: lambda: self._report(request),  # type: ignore[arg-type]
            AckCheckpoint: lambda: self._say(f"durable {request.step}"),  # type: ignore[attr-defined]
            OfferSnapshot: lambda: self._offer(request),  # type: ignore[arg-type]
            PublishSnapshot: lambda: self._publish(request),  # type: ignore[arg-type]
            Leave: lambda: self._say("leave"),
        }
        return answers[type(request)]()

    def _say(self, what: str) -> Done:
        self.said.append(what)
        return Done()

    def _attach(self, request: Attach) -> Attached:
        self._say(f"attach {request.step}")
        policy = Policy(0, request.step)
        return Attached(1, policy, self.missing, policy not in self.published, request.step, self.steps)

    def _batch(self, request: RequestBatch) -> Reply:
        if self.stopping:
            return BatchWait("stopped by the operator", stop=True)
        self._say(f"batch {request.step}")
        return BatchReply(request.step, f"digest {request.step}", ())

    def _report(self, request: ReportStep) -> StepAccepted:
        self._say(f"report {request.step}")
        self.audits.append(request.audits)
        self.stats.append(dict(request.stats))
        done = request.step + 1
        return StepAccepted(Policy(0, done), done % self.publish_period == 0, done >= self.steps)

    def _offer(self, request: OfferSnapshot) -> SnapshotOffer:
        manifest = msgspec.json.decode(request.manifest, type=Manifest)
        self.offered = manifest
        if manifest.kind is SnapshotKind.DELTA and not self.knows_bases:
            return SnapshotOffer(0, send_raw=True)
        return SnapshotOffer(self.received.get(manifest.object_root, 0))

    def _publish(self, request: PublishSnapshot) -> Done:
        assert request.root == self.offered.object_root
        self.published.append(request.policy)
        self.sent.append(self.offered.kind.value)
        return self._say(f"published {request.policy}")


class Sink:
    def __init__(self, desk: Desk, upload_s: float = 1.0) -> None:
        self.desk = desk
        self.upload_s = upload_s
        self.cut_after: list[int] = []
        self.starts: list[int] = []
        self.assets: list[str] = []

    async def upload(self, manifest: Manifest, path: Path, start: int) -> None:
        self.starts.append(start)
        await asyncio.sleep(self.upload_s)
        if self.cut_after:
            self.desk.received[manifest.object_root] = self.cut_after.pop(0)
            raise TransportError("line lost")
        self.desk.received[manifest.object_root] = manifest.object_size

    async def upload_asset(self, name: str, path: Path) -> None:
        self.assets.append(name)


class Setting:
    def __init__(
        self, desk: Desk, disk: LearnerDisk | None = None, upload_s: float = 1.0, files: MemoryDisk | None = None
    ) -> None:
        self.desk = desk
        self.durable = disk or LearnerDisk()
        self.events = RecordedEvents()
        self.sink = Sink(desk, upload_s)
        self.files = files or MemoryDisk()
        self.learner = ModelledLearner(
            LearnerModel(train_s=10, spread=0.0), "run", "bfloat16", self.durable, self.files, Random(0)
        )
        self.packer = ModelledPacker(self.files, 1e6)
        options = LearnerOptions(run_id="run", initial_weights_hash="h", assets={ASSET: Path("config.json")})
        self.program = LearnerProgram(desk, self.sink, self.learner, self.packer, VirtualClock(), self.events, options)


def test_versions_are_durable_before_they_are_published_and_published_in_order() -> None:
    async def main() -> list[str]:
        setting = Setting(Desk())
        await setting.program.run()
        return setting.desk.said

    said = run_virtual(main())
    assert said[:4] == ["attach 0", "durable 0", "published 0.0", "batch 0"]
    assert [word for word in said if word.startswith(("durable", "published"))] == [
        "durable 0", "published 0.0", "durable 2", "published 0.2", "durable 4", "published 0.4",
    ]  # fmt: skip
    assert said.index("batch 2") < said.index("durable 2") < said.index("report 2"), "checkpoints run beside training"
    assert said[-1] == "leave"


def test_an_engine_on_the_learners_weights_hears_of_a_version_before_it_is_durable_or_published() -> None:
    async def main() -> list[str]:
        setting = Setting(Desk())
        said = setting.desk.said
        options = LearnerOptions(run_id="run", initial_weights_hash="h", assets={})
        await LearnerProgram(
            setting.desk, setting.sink, setting.learner, setting.packer, VirtualClock(), setting.events, options,
            lambda policy: said.append(f"resident {policy}"),
        ).run()  # fmt: skip
        return said

    said = run_virtual(main())
    assert said[:4] == ["attach 0", "resident 0.0", "durable 0", "published 0.0"]
    for version in (1, 2, 3, 4):
        assert said[said.index(f"report {version - 1}") + 1] == f"resident 0.{version}"


def test_what_was_audited_before_a_step_goes_with_its_report() -> None:
    def found(step: int) -> RowAudit:
        return RowAudit(step, 0, (1,) + (0,) * len(AUDIT_EDGES_NATS), 0.0, 0.0)

    async def audit(batch: BatchReply) -> tuple[RowAudit, ...]:
        return (found(batch.step),)

    async def main() -> list[tuple[RowAudit, ...]]:
        setting = Setting(Desk())
        setting.learner.audit = audit  # type: ignore[method-assign]
        await setting.program.run()
        return setting.desk.audits

    assert run_virtual(main()) == [(found(step),) for step in range(4)]


def test_a_publish_travels_beside_the_next_step_and_a_second_one_waits_for_it() -> None:
    async def main() -> tuple[list[Policy], list[str]]:
        setting = Setting(Desk(steps=6), upload_s=35.0)
        await setting.program.run()
        return setting.desk.published, setting.desk.said

    published, said = run_virtual(main())
    assert published == [Policy(0, 0), Policy(0, 2), Policy(0, 4), Policy(0, 6)]
    assert said.index("published 0.2") > said.index("report 3")
    assert said.index("published 0.2") < said.index("durable 4")


def test_what_a_snapshot_takes_of_training_is_told_with_the_next_step() -> None:
    """The copy, and the wait for a publish that is still under way; nothing else."""

    async def main() -> list[dict[str, float]]:
        setting = Setting(Desk(steps=6), upload_s=35.0)
        real = setting.learner.freeze

        async def freeze() -> Frozen:
            await asyncio.sleep(3.0)
            return await real()

        setting.learner.freeze = freeze  # type: ignore[method-assign]
        await setting.program.run()
        return setting.desk.stats

    stats = run_virtual(main())
    assert [told["snapshot_s"] for told in stats] == pytest.approx([0, 0, 3, 0, 3, 0])
    waits = [told["publish_wait_s"] for told in stats]
    assert waits[:4] == pytest.approx([0, 0, 0, 0])
    assert 10 < waits[4] < 20, "of 35 s of upload two steps of 10 s passed beside training"


def test_training_goes_on_while_a_snapshot_is_encoded() -> None:
    async def main() -> list[str]:
        setting = Setting(Desk(steps=7, publish_period=3))
        packed = asyncio.Event()
        real = setting.packer.delta

        async def delta(manifest: Manifest, folder: Path) -> tuple[Manifest, Path] | None:
            if manifest.policy.version == 3:
                await packed.wait()
            return await real(manifest, folder)

        async def release() -> None:
            while "report 5" not in setting.desk.said:
                await asyncio.sleep(1.0)
            packed.set()

        setting.packer.delta = delta  # type: ignore[method-assign]
        await asyncio.gather(setting.program.run(), release())
        return setting.desk.said

    said = run_virtual(main())
    assert said.index("report 5") < said.index("published 0.3") < said.index("published 0.6")


def test_resumed_weights_are_published_before_the_first_batch_is_asked_for() -> None:
    """Field report D05."""

    async def main() -> list[str]:
        desk = Desk(steps=44)
        setting = Setting(desk, LearnerDisk(step=40, digest="digest 39", weights="w"))
        await setting.program.run()
        return desk.said

    assert run_virtual(main())[:4] == ["attach 40", "durable 40", "published 0.40", "batch 40"]


def test_a_crash_replays_the_batches_after_the_last_checkpoint() -> None:
    """Field report D04: the counter goes on where the weights are, and the weights end the same."""

    async def main() -> tuple[list[str], str, str]:
        desk, durable = Desk(steps=8), LearnerDisk()
        first = Setting(desk, durable)
        life = asyncio.create_task(first.program.run())
        await asyncio.sleep(58)  # in the middle of step 4
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        cut = len(desk.said)
        second = Setting(desk, durable)
        await second.program.run()
        undisturbed = Setting(Desk(steps=8))
        await undisturbed.program.run()
        return desk.said[cut:], second.learner.weights, undisturbed.learner.weights

    after, weights, expected = run_virtual(main())
    assert after[0].startswith("attach ")
    assert after[0] in ("attach 2", "attach 4")
    assert weights == expected


def test_an_interrupted_upload_goes_on_where_it_stopped() -> None:
    async def main() -> list[int]:
        setting = Setting(Desk(steps=1))
        setting.sink.cut_after = [100, 150]
        await setting.program.run()
        return setting.sink.starts

    assert run_virtual(main())[:3] == [0, 100, 150]


def test_the_first_version_goes_out_whole_and_the_others_as_what_changed() -> None:
    async def main() -> Setting:
        setting = Setting(Desk())
        await setting.program.run()
        return setting

    done = run_virtual(main())
    assert done.desk.sent == ["anchor", "delta", "delta"]
    assert done.desk.offered.base == Policy(0, 2)


def test_a_coordinator_without_the_base_gets_the_whole_snapshot() -> None:
    async def main() -> Desk:
        desk = Desk()
        desk.knows_bases = False
        await Setting(desk).program.run()
        return desk

    assert run_virtual(main()).sent == ["anchor", "anchor", "anchor"]


def test_a_delta_that_the_coordinator_cannot_decode_is_followed_by_the_whole_snapshot() -> None:
    """Its copy of the base may be damaged; that must not end the run."""

    async def main() -> Setting:
        setting = Setting(Desk(steps=2))

        def damage() -> None:
            setting.desk.faults["PublishSnapshot"] = [IntegrityError("tensor w did not become what it must")]

        asyncio.get_running_loop().call_later(10, damage)
        await setting.program.run()
        return setting

    done = run_virtual(main())
    assert done.desk.sent == ["anchor", "anchor"]
    assert done.events.kinds("delta_refused")


def test_after_a_crash_the_delta_is_against_what_was_published_before() -> None:
    async def main() -> tuple[Setting, Setting]:
        first = Setting(Desk(steps=4, publish_period=2))
        await first.program.run()
        later = Desk(steps=8)
        later.published = list(first.desk.published)
        second = Setting(later, first.durable, files=first.files)
        await second.program.run()
        return first, second

    first, second = run_virtual(main())
    assert first.desk.published[-1] == Policy(0, 4)
    assert second.desk.published[-2:] == [Policy(0, 6), Policy(0, 8)]
    assert second.desk.sent == ["delta", "delta"]


def test_a_damaged_older_snapshot_costs_only_bandwidth() -> None:
    async def main() -> Setting:
        setting = Setting(Desk(steps=2))

        async def broken(manifest: Manifest, folder: Path) -> None:
            raise IntegrityError("model.safetensors must have 100 bytes, got 7")

        setting.packer.delta = broken  # type: ignore[method-assign, assignment]
        await setting.program.run()
        return setting

    done = run_virtual(main())
    assert done.desk.sent == ["anchor", "anchor"]
    assert len(done.events.kinds("delta_failed")) == 2


def test_missing_assets_are_uploaded_before_anything_is_published() -> None:
    async def main() -> list[str]:
        desk = Desk(steps=1)
        desk.missing = ("config.json",)
        setting = Setting(desk)
        await setting.program.run()
        return setting.sink.assets

    assert run_virtual(main()) == ["config.json"]


def test_a_fenced_learner_exits() -> None:
    async def main() -> None:
        desk = Desk()
        desk.faults["ReportStep"] = [Fenced("a newer learner has attached")]
        await Setting(desk).program.run()

    with pytest.raises(Fenced, match="newer learner"):
        run_virtual(main())


def test_a_fence_met_by_a_publish_under_way_ends_training_too() -> None:
    async def main() -> None:
        desk = Desk(steps=100)
        setting = Setting(desk, upload_s=0.1)

        def fence() -> None:
            desk.faults["PublishSnapshot"] = [Fenced("a newer learner has attached")]

        asyncio.get_running_loop().call_later(15, fence)
        await setting.program.run()

    with pytest.raises(Fenced):
        run_virtual(main(), until_s=200)


def test_a_coordinator_that_is_away_for_a_while_is_waited_for_and_said() -> None:
    async def main() -> tuple[list[str], int]:
        desk = Desk(steps=2)
        desk.faults["RequestBatch"] = [TransportError("connection refused")] * 6
        setting = Setting(desk)
        await setting.program.run()
        return desk.said, len(setting.events.kinds("coordinator_unreachable"))

    said, told = run_virtual(main())
    assert said[-1] == "leave"
    assert told == 6


def test_a_full_disk_delays_the_publish_and_needs_no_cleaning() -> None:
    """Field report E07."""

    async def main() -> tuple[list[Policy], int]:
        setting = Setting(Desk(steps=2))
        real, full = setting.learner.save_checkpoint, [DiskFull("no space")] * 3

        async def save(frozen: Frozen | None = None) -> None:
            if frozen is not None and frozen.step == 2 and full:
                raise full.pop()
            await real(frozen)

        setting.learner.save_checkpoint = save  # type: ignore[method-assign]
        await setting.program.run()
        return setting.desk.published, len(setting.events.kinds("disk_full"))

    assert run_virtual(main()) == ([Policy(0, 0), Policy(0, 2)], 3)


def test_told_to_stop_it_leaves_a_checkpoint_of_the_last_step() -> None:
    async def main() -> tuple[list[str], int]:
        desk = Desk(steps=100, publish_period=50)
        setting = Setting(desk)

        def stop() -> None:
            desk.stopping = True

        asyncio.get_running_loop().call_later(35, stop)
        await setting.program.run()
        return desk.said, setting.durable.step

    said, durable = run_virtual(main())
    assert said[-2:] == [f"durable {durable}", "leave"]
    assert f"report {durable - 1}" in said


def test_stopped_by_its_user_it_finishes_the_step_and_does_not_wait_for_a_silent_coordinator() -> None:
    async def main() -> tuple[int, float]:
        desk = Desk(steps=100, publish_period=50)
        setting = Setting(desk)

        def stop() -> None:
            setting.program.stop("received SIGTERM")
            desk.faults["AckCheckpoint"] = [TransportError("down")] * 1000

        asyncio.get_running_loop().call_later(35, stop)
        await setting.program.run()
        return setting.durable.step, asyncio.get_running_loop().time()

    step, ended_s = run_virtual(main())
    assert step > 0
    assert ended_s < 120


def test_a_store_that_belongs_to_other_weights_is_told_in_a_sentence() -> None:
    async def main() -> None:
        desk = Desk()
        desk.faults["Attach"] = [Refused("the learner holds 7 training steps, the store only 3")]
        await Setting(desk).program.run()

    with pytest.raises(Refused, match="holds 7 training steps"):
        run_virtual(main())

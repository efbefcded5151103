"""The worker program against a coordinator that is a handful of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.signing import encode_signed, public_key, sign
from echo2.config.sections import TaskSection
from echo2.data.chat import ByteChat
from echo2.data.registry import load_tasks
from echo2.errors import DiskFull, EngineError, IntegrityError, Refused, Starved, TransportError, Unauthorised
from echo2.rollout.engine import ActivationMode
from echo2.rollout.engines.scripted import ScriptedEngine
from echo2.simulation.clock import VirtualClock
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemorySpool
from echo2.simulation.record import RecordedEvents
from echo2.simulation.snapshots import modelled_snapshot
from echo2.transport.messages import (
    AwaitPolicy,
    Done,
    Heartbeat,
    HeartbeatReply,
    Hello,
    LeaseGrant,
    LeaseWait,
    Leave,
    PolicyNews,
    Reply,
    Request,
    RequestLease,
    SubmitGroup,
    SubmitVerdicts,
    Welcome,
)
from echo2.types import Policy, Prompt, RowStatus, Sampling, Trajectory, Verdict
from echo2.worker.installer import SnapshotTerms
from echo2.worker.program import Phase, Worker, WorkerOptions

KEY, OTHER_KEY = bytes(32), bytes(range(32))
TASKS = load_tasks([TaskSection(name="arithmetic")])
PROMPT = TASKS["arithmetic"].prompt("train", 0)


class Desk:
    """Grants leases one after another under whatever is installed, publishes what it is told to."""

    def __init__(self) -> None:
        self.news = asyncio.Condition()
        self.current: Policy | None = None
        self.manifest: bytes = b""
        self.heard: list[Request] = []
        self.submitted: list[SubmitGroup] = []
        self.refusals: dict[str, list[Exception]] = {}
        self.down = False
        self.drain = False
        self.revoked: tuple[str, ...] = ()
        self.prompt: Prompt = PROMPT
        self._leases = 0

    async def publish(
        self, version: int, *, key: bytes = KEY, dtype: str = "bfloat16", run_id: str = "run", nbytes: float = 100.0
    ) -> None:
        manifest, _ = modelled_snapshot(run_id, Policy(0, version), dtype, f"weights-{version}", nbytes)
        async with self.news:
            self.current = manifest.policy
            self.manifest = encode_signed(sign(encode_manifest(manifest), key))
            self.news.notify_all()

    async def call(self, request: Request) -> Reply:
        await asyncio.sleep(0.01)
        if self.down:
            await asyncio.sleep(1)
            raise TransportError("no route to the coordinator")
        self.heard.append(request)
        refusals = self.refusals.get(type(request).__name__)
        if refusals:
            raise refusals.pop(0)
        match request:
            case Hello():
                return Welcome("run", "{}", (), 2.0, self.current)
            case AwaitPolicy(after, wait_s, held):
                news = await self._await_policy(after, wait_s)
                return PolicyNews(news.current) if news.current in held else news
            case RequestLease(installed):
                return self._lease(installed)
            case SubmitGroup():
                self.submitted.append(request)
                return SubmitVerdicts((Verdict.ACCEPTED,) * len(request.rows))
            case Heartbeat():
                return HeartbeatReply(self.drain, self.revoked)
            case Leave():
                return Done()
        raise AssertionError(request)

    async def _await_policy(self, after: Policy | None, wait_s: float) -> PolicyNews:
        try:
            async with asyncio.timeout(wait_s), self.news:
                await self.news.wait_for(lambda: self.current is not None and (after is None or self.current > after))
        except TimeoutError:
            return PolicyNews(self.current)
        return PolicyNews(self.current, (self.manifest,))

    def _lease(self, installed: Policy) -> Reply:
        self._leases += 1
        sampling = Sampling(1.0, 1.0, 32, seed=self._leases)
        lease_id = f"lease-{self._leases}"
        return LeaseGrant(lease_id, self._leases, 1, self.prompt, (0, 1), sampling, installed, 60.0)

    def of(self, kind: type[Request]) -> list[Request]:
        return [request for request in self.heard if type(request) is kind]


class Source:
    """Objects arrive at 1 kB/s, the small ones in half a second."""

    def __init__(self) -> None:
        self.faults: list[Exception] = []
        self.brought: list[Policy] = []
        self.abandoned: list[str] = []

    async def bring(self, signed: bytes, manifest: Manifest) -> Path:
        await asyncio.sleep(max(0.5, manifest.object_size / 1000))
        if self.faults:
            raise self.faults.pop(0)
        self.brought.append(manifest.policy)
        return Path(manifest.object_root)

    def received(self) -> dict[str, int]:
        return {}

    async def abandon(self, root: str) -> None:
        self.abandoned.append(root)

    async def forget_before(self, policy: Policy) -> None: ...


class Stock:
    """Holds whatever it is given."""

    def __init__(self) -> None:
        self.policies: list[Policy] = []

    def held(self) -> tuple[Policy, ...]:
        return tuple(sorted(self.policies))

    def folder(self, policy: Policy) -> Path:
        return Path(str(policy))

    async def build(self, signed: bytes, manifest: Manifest, object_path: Path) -> None:
        self.policies.append(manifest.policy)

    async def tidy(self, installed: Policy | None) -> None: ...


class Setting:
    def __init__(self, *, lanes: int = 1, orphan_after_s: float = 1000.0, spool: MemorySpool | None = None) -> None:
        self.desk = Desk()
        self.source, self.stock = Source(), Stock()
        self.engine = ScriptedEngine(duration=lambda tokens, n, random: 5.0)
        self.spool = spool or MemorySpool()
        self.events = RecordedEvents()
        terms = SnapshotTerms("run", public_key(KEY), "bfloat16")
        options = WorkerOptions(
            snapshots=terms, heartbeat_s=2.0, concurrent_groups=lanes, orphan_after_s=orphan_after_s
        )
        self.worker = Worker(
            self.desk, self.source, self.stock, self.engine, TASKS, ByteChat(), self.spool, VirtualClock(),
            self.events, options,
        )  # fmt: skip

    async def run(self, *steps: tuple[float, Callable[[], object]], drain_at_s: float = 60.0) -> None:
        """Run the worker from a published version 0 until drained; ``steps`` happen at their times."""
        if self.desk.current is None:
            await self.desk.publish(0)
        loop = asyncio.get_running_loop()
        for at_s, step in (*steps, (drain_at_s, lambda: self.worker.drain("the test is over"))):
            loop.call_later(at_s, step)
        await self.worker.run()


def virtual(setting: Callable[[], Setting], *steps: tuple[float, Callable[[Setting], object]]) -> Setting:
    async def main() -> Setting:
        made = setting()
        await made.run(*((at_s, lambda step=step: step(made)) for at_s, step in steps))
        return made

    return run_virtual(main(), until_s=5000)


def test_it_installs_then_works_then_drains_and_leaves() -> None:
    done = virtual(Setting)
    kinds = [type(request).__name__ for request in done.desk.heard]
    assert kinds[0] == "Hello"
    assert kinds[-1] == "Leave"
    assert kinds.index("AwaitPolicy") < kinds.index("RequestLease")
    assert len(done.desk.submitted) >= 10
    row = done.desk.submitted[0].rows[0]
    assert row.status is RowStatus.FINISHED
    assert msgspec.msgpack.decode(row.record, type=Trajectory).policy_min == Policy(0, 0)
    assert done.worker.phase is Phase.GONE
    assert run_virtual(done.spool.pending()) == []


def test_no_lease_is_asked_for_before_something_is_installed() -> None:
    """Field report E11."""

    async def main() -> Setting:
        setting = Setting()
        setting.source.faults = [TransportError("cut")] * 4
        await setting.run()
        return setting

    done = run_virtual(main())
    installed = done.events.kinds("installed")[0]["at_s"]
    leases = [i for i, request in enumerate(done.desk.heard) if isinstance(request, RequestLease)]
    assert installed > 3
    assert all(isinstance(r, Hello | AwaitPolicy | Heartbeat) for r in done.desk.heard[: leases[0]])
    assert all(beat.installed is None for beat in done.desk.heard[: leases[0]] if isinstance(beat, Heartbeat))


def test_an_install_is_told_at_once_and_running_groups_keep_their_version() -> None:
    """I5: a tag changes only with the engine's word, and a group tells what it was sampled under."""

    async def main() -> Setting:
        setting = Setting()
        loop = asyncio.get_running_loop()
        loop.call_later(22, lambda: loop.create_task(setting.desk.publish(2)))
        await setting.run()
        return setting

    done = run_virtual(main())
    told = [question.installed for question in done.desk.of(AwaitPolicy) if isinstance(question, AwaitPolicy)]
    assert list(dict.fromkeys(told)) == [None, Policy(0, 0), Policy(0, 2)]
    versions = {
        msgspec.msgpack.decode(row.record, type=Trajectory).policy_min for g in done.desk.submitted for row in g.rows
    }
    assert versions == {Policy(0, 0), Policy(0, 2)}
    for group in done.desk.submitted:
        spans = [msgspec.msgpack.decode(row.record, type=Trajectory) for row in group.rows]
        assert all(span.policy_min == span.policy_max for span in spans)


def publishing(setting: Setting, *publishes: tuple[float, int, float]) -> None:
    """Publish versions at their times, as whole snapshots of so many bytes."""
    loop = asyncio.get_running_loop()
    for at_s, version, nbytes in publishes:
        loop.call_later(
            at_s, lambda v=version, n=nbytes: loop.create_task(setting.desk.publish(v, nbytes=n))
        )  # fmt: skip


def test_what_is_under_way_is_given_up_for_a_shorter_way_only() -> None:
    """PROTOCOL §5. Version 2 takes 30 s; version 4, published meanwhile, would take as long; version 6 one second."""

    async def main() -> Setting:
        setting = Setting()
        publishing(setting, (10, 2, 30_000), (20, 4, 30_000), (70, 6, 30_000), (75, 8, 1000))
        await setting.run(drain_at_s=150)
        return setting

    done = run_virtual(main())
    installed = [event["policy"] for event in done.events.kinds("installed")]
    assert installed == ["0.0", "0.2", "0.4", "0.8"]
    assert [event["given_up"] for event in done.events.kinds("way_changed")] == ["0.6"]
    assert len(done.source.abandoned) == 1
    assert done.source.brought == [Policy(0, version) for version in (0, 2, 4, 8)]


def test_a_snapshot_that_lies_verified_on_disk_is_run_without_being_brought() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.stock.policies.append(Policy(0, 0))
        await setting.run(drain_at_s=20)
        return setting

    done = run_virtual(main())
    assert done.engine.installed == Policy(0, 0)
    assert done.source.brought == []
    assert done.desk.submitted


def test_drained_while_an_object_is_under_way_it_leaves_at_once() -> None:
    async def main() -> float:
        setting = Setting()
        publishing(setting, (10, 2, 1e6))
        await setting.run(drain_at_s=30)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 40


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"key": OTHER_KEY}, "not signed by this run's key"),
        ({"dtype": "float32"}, "must hold bfloat16, it holds float32"),
        ({"run_id": "other"}, "must be of run run, not of other"),
    ],
)
def test_a_snapshot_that_is_not_the_runs_is_not_installed(broken: dict[str, object], said: str) -> None:
    """I6, field report E12."""

    async def main() -> Setting:
        setting = Setting()
        loop = asyncio.get_running_loop()
        loop.call_later(10, lambda: loop.create_task(setting.desk.publish(2, **broken)))  # type: ignore[arg-type]
        await setting.run()
        return setting

    done = run_virtual(main())
    assert said in done.events.kinds("install_failed")[0]["error"]
    assert done.engine.installed == Policy(0, 0)
    assert done.desk.submitted, "the old policy keeps serving"


class Ailing(ScriptedEngine):
    """Cannot generate for a while."""

    ill = False

    @property
    def fault(self) -> str | None:
        return "the server is starting again" if self.ill else None


def test_a_worker_whose_engine_is_unwell_takes_no_lease_until_it_is_well() -> None:
    async def main() -> tuple[Setting, int]:
        setting = Setting()
        setting.engine.__class__ = Ailing
        granted: list[int] = []

        def ill(now: bool) -> None:
            setting.engine.ill = now  # type: ignore[attr-defined]
            granted.append(len(setting.desk.of(RequestLease)))

        # The lane asks before its group of five seconds ends, so at 30 s every earlier lease is served.
        await setting.run((20, lambda: ill(True)), (30, lambda: granted.append(len(setting.desk.of(RequestLease)))),
                          (40, lambda: ill(False)))  # fmt: skip
        return setting, granted[2] - granted[1]

    done, asked = run_virtual(main())
    assert asked == 0
    assert done.events.kinds("engine_unwell")[0]["error"] == "the server is starting again"
    assert len(done.desk.submitted) >= 6
    states = {beat.state for beat in done.desk.of(Heartbeat) if isinstance(beat, Heartbeat)}
    assert "waiting: the server is starting again" in states


class Mended(ScriptedEngine):
    """Unwell after its third group, until the third try to mend it; nobody publishes anything meanwhile."""

    groups = tries = 0
    ill: str | None = None

    @property
    def fault(self) -> str | None:
        return self.ill

    async def mend(self) -> None:
        self.tries += 1
        if self.tries < 3:
            raise EngineError("no such device")
        self.ill = None

    async def generate(self, token_ids: Any, sampling: Any, n: int, heard: Any = None) -> Any:
        self.groups += 1
        if self.groups == 3:
            self.ill = "the server must run: it ended with exit code 9"
        return await super().generate(token_ids, sampling, n, heard)


def test_a_worker_whose_engine_has_a_fault_mends_it_and_goes_on() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.engine.__class__ = Mended
        await setting.run()
        return setting

    done = run_virtual(main())
    assert done.engine.tries == 3  # type: ignore[attr-defined]
    assert [event["error"] for event in done.events.kinds("engine_not_mended")] == ["no such device"] * 2
    assert len(done.desk.submitted) > 3


class Broken(ScriptedEngine):
    """Fails at once, whatever it is asked, and knows of no fault: a GPU that fell off the bus."""

    async def generate(self, token_ids: Any, sampling: Any, n: int, heard: Any = None) -> Any:
        raise EngineError("unspecified launch failure")


def test_a_machine_on_which_nothing_succeeds_does_not_run_through_the_prompts() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.engine.__class__ = Broken
        await setting.run()
        return setting

    done = run_virtual(main())
    assert 3 <= len(done.desk.submitted) <= 12
    assert {row.status for group in done.desk.submitted for row in group.rows} == {RowStatus.ERROR}


def test_a_failed_load_keeps_the_old_policy_and_is_tried_again() -> None:
    async def main() -> Setting:
        setting = Setting()
        real, faults = setting.engine.prefetch, [EngineError("out of memory"), EngineError("out of memory")]

        async def prefetch(policy: Policy, folder: Path) -> None:
            if policy.version and faults:
                raise faults.pop()
            await real(policy, folder)

        setting.engine.prefetch = prefetch  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        loop.call_later(10, lambda: loop.create_task(setting.desk.publish(2)))
        await setting.run()
        return setting

    done = run_virtual(main())
    assert [event["error"] for event in done.events.kinds("install_failed")] == ["out of memory"] * 2
    assert done.engine.installed == Policy(0, 2)
    states = {beat.state for beat in done.desk.of(Heartbeat) if isinstance(beat, Heartbeat)}
    assert any(state.startswith("waiting: could not install 0.2: out of memory") for state in states)


def test_an_object_that_went_bad_on_the_disk_is_let_go_and_fetched_anew() -> None:
    async def main() -> Setting:
        setting = Setting()
        real, faults = setting.stock.build, [IntegrityError("tensor w is not what the manifest says")]

        async def build(signed: bytes, manifest: Manifest, object_path: Path) -> None:
            if faults:
                raise faults.pop()
            await real(signed, manifest, object_path)

        setting.stock.build = build  # type: ignore[method-assign]
        await setting.run()
        return setting

    done = run_virtual(main())
    assert len(done.source.abandoned) == 1
    assert done.source.brought == [Policy(0, 0), Policy(0, 0)]
    assert done.engine.installed == Policy(0, 0)


@pytest.mark.parametrize(
    "fault", [IntegrityError("chunk 3"), DiskFull("no space"), Refused("0.0 is no longer on the shelf")]
)
def test_a_failed_fetch_is_tried_again_with_whatever_is_newest(fault: Exception) -> None:
    """Field reports E05 and E07."""

    async def main() -> Setting:
        setting = Setting()
        setting.source.faults = [fault]
        await setting.run()
        return setting

    done = run_virtual(main())
    assert len(done.events.kinds("install_failed")) == 1
    assert done.engine.installed == Policy(0, 0)


def test_a_lost_line_is_waited_for_said_and_loses_no_group() -> None:
    done = virtual(
        Setting,
        (12, lambda setting: setattr(setting.desk, "down", True)),
        (40, lambda setting: setattr(setting.desk, "down", False)),
    )
    assert done.events.kinds("coordinator_unreachable")
    leases = [group.lease_id for group in done.desk.submitted]
    assert len(leases) == len(set(leases))
    granted = [f"lease-{n + 1}" for n in range(len(leases))]
    assert leases == granted


def test_what_an_earlier_life_finished_is_held_and_submitted_first() -> None:
    async def main() -> tuple[Setting, Setting]:
        first = Setting()
        await first.desk.publish(0)
        life = asyncio.create_task(first.worker.run())
        await asyncio.sleep(4)
        first.desk.down = True
        await asyncio.sleep(6)
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        second = Setting(spool=first.spool)
        await second.run()
        return first, second

    first, second = run_virtual(main())
    hello = second.desk.heard[0]
    assert isinstance(hello, Hello)
    assert hello.held_leases == ("lease-1",)
    assert second.desk.submitted[0].lease_id == "lease-1"
    assert not first.desk.submitted
    assert run_virtual(second.spool.pending()) == []


def test_a_spool_entry_that_cannot_be_read_is_dropped_and_said() -> None:
    async def main() -> Setting:
        spool = MemorySpool()
        await spool.put("lease-old", b"\xc1")
        setting = Setting(spool=spool)
        await setting.run()
        return setting

    done = run_virtual(main())
    assert done.events.kinds("spool_unreadable")[0]["lease"] == "lease-old"
    assert run_virtual(done.spool.pending()) == []


def test_a_full_disk_takes_no_group_away() -> None:
    class Full(MemorySpool):
        async def put(self, lease_id: str, payload: bytes) -> None:
            raise DiskFull("no space")

    done = virtual(lambda: Setting(spool=Full()))
    assert done.events.kinds("spool_failed")
    assert len(done.desk.submitted) >= 10


def test_a_refused_submission_is_an_answer() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.desk.refusals["SubmitGroup"] = [Refused("larger than max_submit_bytes")]
        await setting.run()
        return setting

    done = run_virtual(main())
    assert done.events.kinds("submission_refused")[0]["lease"] == "lease-1"
    assert done.desk.submitted[0].lease_id == "lease-2"


def test_a_revoked_lease_is_not_finished() -> None:
    done = virtual(Setting, (3, lambda setting: setattr(setting.desk, "revoked", ("lease-1",))))
    assert done.events.kinds("lease_revoked")[0]["lease"] == "lease-1"
    assert done.desk.submitted[0].lease_id == "lease-2"


def test_a_task_it_does_not_have_is_a_failed_row() -> None:
    """I4: not a zero reward."""

    async def main() -> Setting:
        setting = Setting()
        setting.desk.prompt = msgspec.structs.replace(PROMPT, task="poker")
        await setting.run(drain_at_s=5)
        return setting

    row = run_virtual(main()).desk.submitted[0].rows[0]
    assert (row.status, row.error) == (RowStatus.ERROR, "this worker has no task named poker")


def test_a_group_that_never_ends_is_reported_as_timed_out() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.engine = ScriptedEngine(duration=lambda tokens, n, random: 1e6)
        setting.worker._engine = setting.worker._installer._engine = setting.engine
        await setting.run(drain_at_s=80)
        return setting

    rows = run_virtual(main()).desk.submitted[0].rows
    assert {row.status for row in rows} == {RowStatus.TIMEOUT}


@pytest.mark.parametrize("at", ["Hello", "Heartbeat", "RequestLease", "AwaitPolicy", "SubmitGroup"])
def test_a_revoked_credential_stops_it_with_a_sentence(at: str) -> None:
    async def main() -> None:
        setting = Setting()
        setting.desk.refusals[at] = [Unauthorised("the credential is unknown or revoked")]
        await setting.run()

    with pytest.raises(Unauthorised, match="unknown or revoked"):
        run_virtual(main())


def test_a_task_that_differs_is_told_at_hello() -> None:
    async def main() -> None:
        setting = Setting()
        setting.desk.refusals["Hello"] = [Refused("task arithmetic differs here")]
        await setting.run()

    with pytest.raises(Refused, match="differs here"):
        run_virtual(main())


def test_a_coordinator_that_forgot_the_worker_is_told_again() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.desk.refusals["Heartbeat"] = [Refused("say hello first")]
        await setting.run()
        return setting

    done = run_virtual(main())
    assert len(done.desk.of(Hello)) == 2
    assert done.desk.submitted


def test_refused_leases_are_asked_for_again_later() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.desk.refusals["RequestLease"] = [Refused("not now")] * 3
        await setting.run()
        return setting

    done = run_virtual(main())
    assert len(done.events.kinds("lease_refused")) == 3
    assert done.desk.submitted


def test_an_eager_coordinator_cannot_make_it_spin() -> None:
    async def main() -> Setting:
        setting = Setting()
        setting.desk._lease = lambda installed: LeaseWait("the gate is shut")  # type: ignore[method-assign]
        await setting.run(drain_at_s=20)
        return setting

    assert len(run_virtual(main()).desk.of(RequestLease)) < 100


def test_orphaned_it_shuts_down_and_keeps_its_groups() -> None:
    async def main() -> Setting:
        setting = Setting(orphan_after_s=100.0)
        asyncio.get_running_loop().call_later(4, lambda: setattr(setting.desk, "down", True))
        with pytest.raises(Starved, match="must answer within 100 s"):
            await setting.run(drain_at_s=4000)
        assert 100 < asyncio.get_running_loop().time() < 250
        return setting

    done = run_virtual(main())
    assert [lease for lease, _ in run_virtual(done.spool.pending())] == ["lease-1"]


def test_draining_without_a_coordinator_ends_in_time_with_the_group_in_the_spool() -> None:
    async def main() -> Setting:
        setting = Setting()
        asyncio.get_running_loop().call_later(4, lambda: setattr(setting.desk, "down", True))
        await setting.run(drain_at_s=6)
        assert asyncio.get_running_loop().time() < 200
        return setting

    done = run_virtual(main())
    assert done.events.kinds("left_in_spool")
    assert len(run_virtual(done.spool.pending())) == 1


def test_draining_before_it_was_welcomed_just_ends() -> None:
    async def main() -> float:
        setting = Setting()
        setting.desk.down = True
        await setting.run(drain_at_s=10)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10)


@pytest.mark.parametrize(("drain_at_s", "leaves_by_s"), [(30, 35), (250, 490)])
def test_a_drain_ends_the_first_start_of_an_engine_and_awaits_a_later_one(
    drain_at_s: float, leaves_by_s: float
) -> None:
    """A server takes minutes to start; one that is being replaced is not left without weights."""

    class Starting(ScriptedEngine):
        async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
            await asyncio.sleep(200)
            await super().activate(policy, mode)

    async def main() -> Setting:
        setting = Setting()
        setting.engine = Starting(duration=lambda tokens, n, random: 5.0)
        setting.worker._engine = setting.worker._installer._engine = setting.engine
        publishing(setting, (220, 1, 10))
        await setting.run(drain_at_s=drain_at_s)
        assert drain_at_s <= asyncio.get_running_loop().time() < leaves_by_s
        return setting

    installed = [event["policy"] for event in run_virtual(main()).events.kinds("installed")]
    assert installed == ([] if drain_at_s == 30 else ["0.0", "0.1"])


def test_told_to_drain_by_the_coordinator_it_does() -> None:
    done = virtual(Setting, (12, lambda setting: setattr(setting.desk, "drain", True)))
    assert done.events.kinds("left")[0]["at_s"] < 25


def test_several_lanes_hold_several_leases_and_tell_them() -> None:
    done = virtual(lambda: Setting(lanes=3))
    held = max(len(beat.leases) for beat in done.desk.of(Heartbeat) if isinstance(beat, Heartbeat))
    assert held == 3


class Resident(ScriptedEngine):
    """Its owner says which version it runs."""

    def __init__(self) -> None:
        super().__init__(duration=lambda tokens, n, random: 5.0)
        self._moved = asyncio.Event()

    def settle(self, version: int) -> None:
        self._installed = Policy(0, version)
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def settled(self, after: Policy | None) -> Policy:
        while (policy := self.installed) is None or policy == after:
            await self._moved.wait()
        return policy


def test_a_worker_on_the_learners_weights_asks_for_no_snapshot_and_tells_of_each_version_at_once() -> None:
    async def main() -> tuple[Desk, list[tuple[float, Policy | None]]]:
        desk, engine, clock = Desk(), Resident(), VirtualClock()
        options = WorkerOptions(
            snapshots=SnapshotTerms("run", public_key(KEY), "float32"), heartbeat_s=1000.0, concurrent_groups=2,
            orphan_after_s=1e6,
        )  # fmt: skip
        worker = Worker(
            desk, None, None, engine, TASKS, ByteChat(), MemorySpool(), clock, RecordedEvents(), options,
            resident=engine,
        )  # fmt: skip
        beats: list[tuple[float, Policy | None]] = []
        answer = desk.call

        async def noted(request: Any) -> Any:
            if isinstance(request, Heartbeat):
                beats.append((clock.monotonic(), request.installed))
            return await answer(request)

        desk.call = noted  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        for at_s, version in ((10.0, 0), (20.0, 1), (30.0, 2)):
            loop.call_later(at_s, engine.settle, version)
        loop.call_later(40.0, worker.drain, "the test is over")
        await worker.run()
        return desk, beats

    desk, beats = run_virtual(main(), until_s=5000)
    assert not [request for request in desk.heard if isinstance(request, AwaitPolicy)]
    for at_s, version in ((10.0, 0), (20.0, 1), (30.0, 2)):
        assert any(policy == Policy(0, version) and 0 <= told_s - at_s < 0.1 for told_s, policy in beats)
    policies = [msgspec.msgpack.decode(group.rows[0].record, type=Trajectory).policy_min for group in desk.submitted]
    assert set(policies) == {Policy(0, 0), Policy(0, 1), Policy(0, 2)}

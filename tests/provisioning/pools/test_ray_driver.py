"""What the line's process makes of Ray's answers; ``FakeRay`` stands for the module ``ray``."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from echo2.provisioning.observation import Phase
from echo2.provisioning.pools import ray_driver
from echo2.provisioning.pools.ray_driver import Driver
from echo2.provisioning.pools.ray_machine import About, Ended
from echo2.provisioning.pools.ray_messages import Duty, Found, Look, Start, Stop
from echo2.provisioning.pools.ray_offers import Needs


class RayError(Exception): ...


class ActorUnavailableError(RayError): ...


class ActorDiedError(RayError): ...


class Method:
    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self._answer = answer

    def remote(self, *arguments: object) -> Awaitable[Any]:
        return self._answer()


class Actor:
    """Answers with ``script`` when it is asked what it is, in turn; the last answer stays."""

    def __init__(self, *script: About | Exception | None) -> None:
        self.script = list(script) or [About(1.5, 3.0, "node-1")]
        self.end: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()
        self.stops = 0
        self.about, self.ended, self.stop = Method(self._about), Method(self._ended), Method(self._stop)

    async def _about(self) -> About:
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        assert answer is not None
        return answer

    async def _ended(self) -> Ended:
        return await asyncio.shield(self.end)

    async def _stop(self) -> None:
        self.stops += 1


class FakeRay:
    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=ActorUnavailableError)
        self.util = SimpleNamespace(list_named_actors=lambda: list(self.listed))
        self.actors: dict[str, Actor] = {}
        self.listed: set[str] = set()
        self.next: Actor | Exception | None = None
        self.killed: list[Actor] = []
        self.options: list[dict[str, Any]] = []

    def remote(self, kind: type) -> Any:
        return SimpleNamespace(options=self._options)

    def _options(self, *, name: str, **options: Any) -> Any:
        self.options.append(options)
        return SimpleNamespace(remote=lambda duty: self._make(name))

    def _make(self, name: str) -> Actor:
        assert self.next is not None
        if isinstance(self.next, Exception):
            raise self.next
        self.listed.add(name)
        return self.actors.setdefault(name, self.next)

    def get_actor(self, name: str) -> Actor:
        if name not in self.actors:
            raise ValueError(f"no actor {name}")
        return self.actors[name]

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)
        actor.script = [ActorDiedError("killed by ray.kill")]

    def nodes(self) -> list[dict[str, Any]]:
        return [{"NodeID": str(k), "Alive": bool(k), "Resources": {"CPU": 4.0}} for k in range(2)]

    def available_resources(self) -> dict[str, float]:
        return {"CPU": 2.0}


def start(machine_id: str = "m-1", needs: Needs = Needs(cpus=2.0)) -> Start:  # noqa: B008 - immutable
    duty = Duty(machine_id=machine_id, offer="m", usd_per_h=1.5, join="j", program=("worker",), folder="/folder")
    return Start(1, duty, needs)


Scene = Callable[[FakeRay, Driver], Awaitable[None]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "AGAIN_S", 0.01)
    monkeypatch.setattr(ray_driver, "FIRST_WORD_S", 0.05)
    monkeypatch.setattr(ray_driver, "THREAD_S", 1.0)


async def play(scene: Scene) -> None:
    async with asyncio.TaskGroup() as group:
        ray = FakeRay()
        await scene(ray, Driver(ray, group))
        for task in asyncio.all_tasks():
            if task.get_name().startswith("follow "):
                task.cancel()


async def seen(driver: Driver) -> tuple[Found, ...]:
    return (await driver.answer(Look(9))).machines


async def until(driver: Driver, phase: Phase) -> Found:
    async with asyncio.timeout(5.0):
        while True:
            (found,) = await seen(driver)
            if found.phase is phase:
                return found
            await asyncio.sleep(0)


async def test_an_order_becomes_a_detached_actor_that_is_never_restarted() -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.next = Actor()
        needs = Needs(cpus=2.0, gpus=1.0, accelerator_type="A100", custom={"site": 1.0})
        assert (await driver.answer(start(needs=needs))).fault == ""
        assert (await driver.answer(start(needs=needs))).fault == ""
        assert ray.options == [
            {
                "get_if_exists": True, "lifetime": "detached", "max_restarts": 0, "num_cpus": 2.0, "num_gpus": 1.0,
                "resources": {"site": 1.0}, "accelerator_type": "A100",
            }
        ]  # fmt: skip
        reply = await driver.answer(Look(2))
        (found,) = reply.machines
        assert (found.machine_id, found.offer, found.phase, found.usd_per_h) == ("m-1", "m", Phase.ACTIVE, 1.5)
        assert (found.node_id, 3.0 <= found.age_s < 60.0) == ("node-1", True)
        assert ([node.node_id for node in reply.nodes], reply.available) == (["1"], {"CPU": 2.0})

    await play(scene)


@pytest.mark.parametrize(
    ("raised", "fault", "why"),
    [
        (ValueError("bad\n resource"), "refused", "bad resource"),
        (RayError("no head"), "unreachable", "no head"),
        (RuntimeError(""), "unreachable", "RuntimeError"),
        (TimeoutError(), "unreachable", "Ray did not answer within 1 s"),
    ],
)
async def test_what_ray_raises_becomes_a_fault_in_one_line(raised: Exception, fault: str, why: str) -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.next = raised
        reply = await driver.answer(start())
        assert (reply.number, reply.fault, reply.why) == (1, fault, why)
        assert await seen(driver) == ()

    await play(scene)


async def test_an_actor_that_cannot_be_reached_for_a_while_is_not_lost_and_a_dead_one_is() -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.next = Actor(ActorUnavailableError("no route"), ActorUnavailableError("no route"), About(1.5, 0.0, "n"))
        await driver.answer(start())
        await until(driver, Phase.ACTIVE)
        ray.next.end.set_exception(ActorUnavailableError("no route"))
        assert (await until(driver, Phase.ACTIVE)).detail == ""
        ray.next.script = [ActorDiedError("it died\n\tpid: 7\nThe node is gone.")]
        lost = await until(driver, Phase.LOST)
        assert lost.detail == "it died The node is gone."

    await play(scene)


@pytest.mark.parametrize(("never_worked", "phase"), [(True, Phase.FAILED), (False, Phase.LOST)])
async def test_the_end_of_its_worker_is_the_end_of_a_machine(never_worked: bool, phase: Phase) -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.next = Actor()
        await driver.answer(start())
        await until(driver, Phase.ACTIVE)
        ray.next.end.set_result(Ended(never_worked, "exit code"))
        assert (await until(driver, phase)).detail == "exit code"

    await play(scene)


async def test_a_machine_is_stopped_in_order_and_one_that_waits_is_called_off() -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        running = ray.next = Actor()
        await driver.answer(start("m-1"))
        await seen(driver)
        waiting = ray.next = Actor(None)
        await driver.answer(start("m-2"))
        assert {found.machine_id: found.phase for found in await seen(driver)} == {
            "m-1": Phase.ACTIVE,
            "m-2": Phase.STARTING,
        }
        for machine_id in ("m-1", "m-2", "m-3"):
            assert (await driver.answer(Stop(3, machine_id))).fault == ""
        assert (ray.killed, running.stops, waiting.stops) == ([running, waiting], 1, 0)
        assert await seen(driver) == (), "also while Ray still lists their names"

    await play(scene)


async def test_a_machine_that_does_not_die_is_no_stopped_one() -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.next = Actor()
        await driver.answer(start())
        ray.kill = lambda actor: None  # type: ignore[method-assign]
        assert (await driver.answer(Stop(3, "m-1"))).fault == "unreachable"
        assert len(await seen(driver)) == 1

    await play(scene)


async def test_actors_of_an_earlier_life_are_found_and_dead_names_are_not() -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.actors = {"m-1 m": Actor(), "stranger": Actor()}
        ray.listed = {"m-1 m", "m-2 m", "stranger"}
        (found,) = await seen(driver)
        assert (found.machine_id, found.offer, found.phase) == ("m-1", "m", Phase.ACTIVE)
        assert (await driver.answer(start("m-1"))).fault == ""
        assert ray.options == [], "it is there"

    await play(scene)


async def test_a_stop_waits_for_the_start_that_came_before_it() -> None:
    async def scene(ray: FakeRay, driver: Driver) -> None:
        ray.next = Actor()
        started, stopped = await asyncio.gather(driver.answer(start()), driver.answer(Stop(2, "m-1")))
        assert (started.fault, stopped.fault) == ("", "")
        assert (ray.killed, await seen(driver)) == ([ray.next], ())

    await play(scene)

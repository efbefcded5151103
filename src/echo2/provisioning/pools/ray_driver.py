"""The ray pool's line to its cluster, as a process of its own: ``python -m echo2.provisioning.pools.ray_driver``.

A process, because Ray ends the process that is its driver when the cluster's head is gone for a minute, and takes its
signal handlers: neither may happen to a coordinator. Calls come on standard input, replies go out on standard output.

Invariant: every question to Ray has a deadline, but for an order, which lasts until Ray took it or ends this process:
calls for one machine are carried out one after another, so a stop finds what an earlier start began. The process ends
with its pool.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, TypeVar

import msgspec

from echo2.provisioning.observation import Phase
from echo2.provisioning.pools.ray_machine import FORCED_S, About, Ended, RayMachine
from echo2.provisioning.pools.ray_messages import (
    MAX_LINE_BYTES,
    Call,
    Connect,
    Found,
    Look,
    Reply,
    Start,
    Stop,
    encode,
    read_call,
)
from echo2.provisioning.pools.ray_offers import Node

THREAD_S = 10.0
"""Ray answers questions of the cluster within milliseconds, or is not there."""
FIRST_WORD_S = 2.0
"""Machines that were just found or ordered may speak for so long before a look goes on without them."""
LEAVE_S = 20.0
"""For a worker that is stopped, to submit what it holds."""
AGAIN_S = 0.5
LAST_BREATH_S = 5.0

T = TypeVar("T")


class Watched:
    """A machine as this process knows it."""

    def __init__(self, actor: Any, machine_id: str, offer: str) -> None:
        self.actor = actor
        self.found = Found(machine_id=machine_id, offer=offer, phase=Phase.STARTING, detail="not placed yet")
        self.spoke = asyncio.Event()
        self._spoke_s = 0.0

    @property
    def runs(self) -> bool:
        return self.found.phase is Phase.ACTIVE

    def began(self, about: About) -> None:
        self._spoke_s = time.monotonic() - about.age_s
        self._become(phase=Phase.ACTIVE, usd_per_h=about.usd_per_h, node_id=about.node_id, detail="")

    def ended(self, ended: Ended) -> None:
        self._become(phase=Phase.FAILED if ended.never_worked else Phase.LOST, detail=ended.why)

    def died(self, why: str) -> None:
        self._become(phase=Phase.LOST, detail=why)

    def seen(self) -> Found:
        age_s = time.monotonic() - self._spoke_s if self._spoke_s else 0.0
        return msgspec.structs.replace(self.found, age_s=age_s)

    def _become(self, **changes: Any) -> None:
        self.found = msgspec.structs.replace(self.found, **changes)
        self.spoke.set()


class Driver:
    """Calls in, replies out, between a pool and ``ray``, the module, once it is connected."""

    def __init__(self, ray: Any, group: asyncio.TaskGroup) -> None:
        self._ray = ray
        self._group = group
        self._machines: dict[str, Watched] = {}
        self._stopped: set[str] = set()
        """Ray lists the names of killed actors for a moment."""
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By machine; their waiters are served in order."""

    async def answer(self, call: Call) -> Reply:
        """Never raises: what Ray raises becomes a fault."""
        try:
            match call:
                case Start():
                    async with self._turns[call.duty.machine_id]:
                        await self._start(call)
                case Stop():
                    async with self._turns[call.machine_id]:
                        await self._stop(call.machine_id)
                case Look():
                    return await self._look(call.number)
                case Connect():
                    raise ValueError("a line is connected once")
        except TimeoutError:
            return Reply(number=call.number, fault="unreachable", why=f"Ray did not answer within {THREAD_S:g} s")
        except ValueError as error:
            return Reply(number=call.number, fault="refused", why=_told(error))
        except Exception as error:  # of a library that raises what it likes; the pool must hear of it
            return Reply(number=call.number, fault="unreachable", why=_told(error))
        return Reply(number=call.number)

    async def _start(self, call: Start) -> None:
        duty, needs = call.duty, call.needs
        if duty.machine_id not in self._machines:
            await self._find()
        if duty.machine_id in self._machines:
            return
        options = self._ray.remote(RayMachine).options(
            name=f"{duty.machine_id} {duty.offer}", get_if_exists=True, lifetime="detached",
            max_restarts=0,  # its join string was for one worker
            num_cpus=needs.cpus, num_gpus=needs.gpus, resources=dict(needs.custom),
            accelerator_type=needs.accelerator_type or None,
        )  # fmt: skip
        actor = await asyncio.to_thread(options.remote, duty)
        self._stopped.discard(duty.machine_id)
        self._watch(Watched(actor, duty.machine_id, duty.offer))

    async def _stop(self, machine_id: str) -> None:
        if machine_id not in self._machines:
            await self._find()
        watched = self._machines.get(machine_id)
        if watched is None:
            return
        self._stopped.add(machine_id)
        if watched.runs:
            try:
                async with asyncio.timeout(LEAVE_S + FORCED_S + AGAIN_S):
                    await watched.actor.stop.remote(LEAVE_S)
            except (TimeoutError, self._ray.exceptions.RayError) as error:
                print(f"{machine_id} was not stopped in order: {_told(error)}", file=sys.stderr, flush=True)
        await _in_thread(partial(self._ray.kill, watched.actor))
        async with asyncio.timeout(THREAD_S):
            await self._until_dead(watched.actor)
        del self._machines[machine_id]

    async def _look(self, number: int) -> Reply:
        await self._find()
        silent = [watched.spoke.wait() for watched in self._machines.values() if not watched.spoke.is_set()]
        if silent:
            try:
                async with asyncio.timeout(FIRST_WORD_S):
                    await asyncio.gather(*silent)
            except TimeoutError:
                pass
        for watched in self._machines.values():
            watched.spoke.set()  # no further look waits for one that is not placed
        nodes = await _in_thread(self._ray.nodes)
        available = await _in_thread(self._ray.available_resources)
        return Reply(
            number=number,
            machines=tuple(watched.seen() for watched in self._machines.values()),
            nodes=tuple(Node(node["NodeID"], node["Resources"]) for node in nodes if node["Alive"]),
            available=available,
        )

    async def _find(self) -> None:
        """Machines that an earlier life of this process started."""
        for name in await _in_thread(self._ray.util.list_named_actors):
            machine_id, _, offer = name.partition(" ")
            if offer and machine_id not in self._machines and machine_id not in self._stopped:
                try:
                    actor = await _in_thread(partial(self._ray.get_actor, name))
                except ValueError:
                    continue  # it is gone by now
                if machine_id not in self._machines:
                    self._watch(Watched(actor, machine_id, offer))

    def _watch(self, watched: Watched) -> None:
        machine_id = watched.found.machine_id
        self._machines[machine_id] = watched
        self._group.create_task(self._follow(watched), name=f"follow {machine_id}")

    async def _follow(self, watched: Watched) -> None:
        """Until it has ended."""
        while True:
            try:
                watched.began(await watched.actor.about.remote())
                watched.ended(await watched.actor.ended.remote())
            except self._ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(AGAIN_S)  # the network, perhaps: Ray says when it is dead
                continue
            except self._ray.exceptions.RayError as error:
                watched.died(_told(error))
            return

    async def _until_dead(self, actor: Any) -> None:
        while True:
            try:
                await actor.about.remote()
            except self._ray.exceptions.ActorUnavailableError:
                pass
            except self._ray.exceptions.RayError:
                return
            await asyncio.sleep(AGAIN_S / 5)


async def serve(calls: asyncio.StreamReader, replies: BinaryIO) -> None:
    """Until the pool's end of the pipe is closed."""

    def say(reply: Reply) -> None:
        replies.write(encode(reply))
        replies.flush()

    async def carry_out(call: Call) -> None:
        say(await driver.answer(call))

    first = await _next(calls)
    if not isinstance(first, Connect):
        return
    try:
        ray = await asyncio.to_thread(_connect, first)
    except Exception as error:  # Ray has no error of its own for most of this
        versions = "version" in str(error).lower()
        say(Reply(number=first.number, fault="refused" if versions else "unreachable", why=_told(error)))
        return
    async with asyncio.TaskGroup() as group:
        driver = Driver(ray, group)
        say(Reply(number=first.number))
        while (call := await _next(calls)) is not None:
            group.create_task(carry_out(call))
        end_soon()
        await asyncio.to_thread(ray.shutdown)
        os._exit(0)


def end_soon() -> None:
    """Ray's threads may be waiting for a cluster that is gone."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, LAST_BREATH_S)


def _connect(first: Connect) -> Any:
    """Off the main thread, where Ray takes no signal handlers."""
    import ray

    ray.init(address=first.address, namespace=first.namespace, log_to_driver=False, configure_logging=False)
    return ray


async def _next(calls: asyncio.StreamReader) -> Call | None:
    line = await calls.readline()
    return read_call(line) if line.endswith(b"\n") else None


async def _in_thread(question: Callable[[], T]) -> T:
    async with asyncio.timeout(THREAD_S):
        return await asyncio.to_thread(question)


def _told(error: BaseException) -> str:
    """In one line of readable length, without the indented particulars that Ray puts before the cause."""
    words = " ".join(line.strip() for line in str(error).splitlines() if not line.startswith("\t"))
    return (words or type(error).__name__)[:300]


async def main() -> None:
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what Ray prints is no reply
    calls = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(calls)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin.buffer)
    await serve(calls, replies)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C reaches the coordinator too, and it decides
    asyncio.run(main())

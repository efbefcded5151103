"""Anchors beside the run, and the way that a worker is told."""

from __future__ import annotations

import asyncio

import pytest
from desks import KEY, LEARNER, ONE, attach, coordinator

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.parse import encode_manifest
from echo2.broadcast.signing import open_signed, public_key
from echo2.coordinator.program import Coordinator
from echo2.errors import DiskFull
from echo2.simulation.loop import run_virtual
from echo2.simulation.record import RecordedEvents
from echo2.simulation.snapshots import modelled_delta, modelled_snapshot
from echo2.transport.messages import (
    AckCheckpoint,
    Attach,
    Attached,
    AwaitPolicy,
    OfferSnapshot,
    PolicyNews,
    PublishSnapshot,
    SnapshotOffer,
)
from echo2.types import Policy

WHOLE, SMALL = 10_000.0, 100.0


class Publisher:
    """A learner that publishes versions 0, 2, 4 … as deltas where the coordinator takes them."""

    def __init__(self, made: Coordinator, epoch: int) -> None:
        self.made = made
        self.epoch = epoch
        self.before: Manifest | None = None

    async def publish(self, version: int, delta_bytes: float = SMALL) -> None:
        made = self.made
        made.books.state.steps_reported = made.books.buffer.next_batch = version
        await made.handle(LEARNER, AckCheckpoint(self.epoch, version))
        raw, data = modelled_snapshot("run", Policy(0, version), "bfloat16", f"w{version}", WHOLE)
        sent, token = raw, data
        if self.before is not None:
            sent, token = modelled_delta(raw, data, self.before, delta_bytes)
        self.before = raw
        offer = await made.handle(LEARNER, OfferSnapshot(self.epoch, encode_manifest(sent)))
        assert isinstance(offer, SnapshotOffer)
        assert not offer.send_raw
        await made.shelf.write(sent.object_root, 0, token)
        await made.handle(LEARNER, PublishSnapshot(self.epoch, sent.policy, sent.object_root))


async def publisher(**sections: dict[str, object]) -> Publisher:
    made = await coordinator(**sections)
    attached = await made.handle(LEARNER, Attach("run", 0, "", "initial", ()))
    assert isinstance(attached, Attached)
    return Publisher(made, attached.epoch)


async def way(
    made: Coordinator, *held: int, after: int | None = None, received: dict[str, int] | None = None
) -> list[str]:
    """What a worker is told that holds these versions."""
    policies = tuple(Policy(0, version) for version in held)
    request = AwaitPolicy(None if after is None else Policy(0, after), 1.0, policies, received or {})
    news = await made.handle(ONE, request)
    assert isinstance(news, PolicyNews)
    manifests = [open_signed(signed, public_key(KEY)) for signed in news.path]
    return [f"{manifest.policy} {manifest.kind.value}" for manifest in manifests]


def told(made: Coordinator) -> list[str]:
    return [f"{entry.policy} {entry.kind.value}" for entry in made.shelf.catalogue()]


def test_a_worker_is_told_the_cheapest_way_from_what_it_holds() -> None:
    async def main() -> None:
        learner = await publisher(staleness={"budget": 12, "publish_period": 2})
        for version in (0, 2, 4):
            await learner.publish(version)
        made = learner.made
        assert await way(made) == ["0.0 anchor", "0.2 delta", "0.4 delta"]
        assert await way(made, 0) == ["0.2 delta", "0.4 delta"]
        assert await way(made, 0, 2, after=2) == ["0.4 delta"]
        assert await way(made, 4) == [], "it holds the current one: nothing is to be brought"
        assert await way(made, 4, after=4) == [], "nothing is newer"

    run_virtual(main())


def test_what_workers_bring_stays_while_they_say_so_and_is_told_when_it_is_gone() -> None:
    async def main() -> None:
        sections = {"broadcast": {"anchor_every": 2}, "staleness": {"budget": 3, "publish_period": 2}}
        learner = await publisher(**sections, coordinator={"dead_after_s": 20.0, "heartbeat_s": 5.0})
        made = learner.made
        await learner.publish(0)
        assert await way(made) == ["0.0 anchor"]
        anchor = made.shelf.catalogue()[0].root
        running = asyncio.create_task(made.run())
        for version in (2, 4, 6, 8):
            await learner.publish(version)
            await asyncio.sleep(10)
            if version < 8:
                assert await way(made, after=version, received={anchor: 10 * version}) == []
        assert "0.0 anchor" in told(made), "an old worker still brings it"
        await asyncio.sleep(30)
        await learner.publish(10)
        assert "0.0 anchor" not in told(made)
        news = await made.handle(ONE, AwaitPolicy(None, 1.0, (), {anchor: 70}))
        assert isinstance(news, PolicyNews)
        assert news.gone == (anchor,)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtual(main())


def test_a_publish_does_not_wait_for_the_anchor_that_comes_due_with_it() -> None:
    async def main() -> None:
        learner = await publisher(broadcast={"anchor_every": 2}, staleness={"budget": 12, "publish_period": 2})
        made = learner.made
        real, begun = made.shelf.add_anchor, asyncio.Event()

        async def slow(policy: Policy) -> str | None:
            begun.set()
            await asyncio.sleep(50)
            return await real(policy)

        made.shelf.add_anchor = slow  # type: ignore[method-assign]
        running = asyncio.create_task(made.run())
        for version in (0, 2, 4):
            await learner.publish(version)
        began = asyncio.get_running_loop().time()
        await begun.wait()
        await learner.publish(6)
        assert await way(made, 4, after=4) == ["0.6 delta"]
        assert asyncio.get_running_loop().time() - began < 5
        await asyncio.sleep(60)
        assert "0.4 anchor" in told(made)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtual(main())


def test_an_anchor_that_could_not_be_made_is_tried_again_and_the_old_one_stands() -> None:
    async def main() -> None:
        learner = await publisher(broadcast={"anchor_every": 1}, staleness={"budget": 12, "publish_period": 2})
        made = learner.made
        real, full = made.shelf.add_anchor, [DiskFull("no space")] * 2

        async def fails(policy: Policy) -> str | None:
            if full:
                raise full.pop()
            return await real(policy)

        made.shelf.add_anchor = fails  # type: ignore[method-assign]
        running = asyncio.create_task(made.run())
        await learner.publish(0)
        await learner.publish(2)
        await asyncio.sleep(1)
        assert told(made) == ["0.0 anchor", "0.2 delta"]
        await asyncio.sleep(70)
        assert "0.2 anchor" in told(made)
        assert isinstance(made.events, RecordedEvents)
        assert len(made.events.kinds("anchor_failed")) == 2
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    run_virtual(main())


def test_a_worker_without_any_way_is_told_as_soon_as_there_is_one() -> None:
    async def main() -> None:
        made = await coordinator()
        await attach(made)  # a version that counts as published and lies nowhere
        asking = asyncio.create_task(made.handle(ONE, AwaitPolicy(None, 1.0)))
        assert await asking == PolicyNews(Policy(0, 0), ())

    run_virtual(main())


@pytest.mark.parametrize(("sent", "share"), [(SMALL, [0.0, 0.5, 2 / 3]), (WHOLE - 1, [0.0, 0.5, 2 / 3])])
def test_publishes_are_counted_by_what_they_sent_and_a_repeated_one_once(sent: float, share: list[float]) -> None:
    async def main() -> list[float]:
        learner = await publisher(staleness={"budget": 12, "publish_period": 2})
        shares = []
        for version in (0, 2, 4):
            await learner.publish(version, sent)
            newest = learner.made.shelf.catalogue()[-1]
            await learner.made.handle(LEARNER, PublishSnapshot(learner.epoch, newest.policy, newest.root))
            state = learner.made.books.state
            shares.append(state.deltas / state.publishes)
        return shares

    assert run_virtual(main()) == share

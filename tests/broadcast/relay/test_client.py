from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from relays import RunKeys

from echo2.broadcast.relay.child import Patience
from echo2.broadcast.relay.client import RelayClient, RelayStuck
from echo2.broadcast.relay.control import Announced, Open
from echo2.broadcast.signing import generate_key
from echo2.errors import IntegrityError, TransportError, UserError
from echo2.simulation.record import RecordedEvents
from echo2.types import Policy

SCRIPT = Path(__file__).parents[2] / "support" / "scripted_relay.py"
FAST = Patience(first_pause_s=0.01, most_pause_s=0.02)
pytestmark = pytest.mark.integration


class Stand:
    """A client of the scripted relay."""

    def __init__(self, folder: Path) -> None:
        self.keys = RunKeys(folder)
        self.published = self.keys.publish(1, 4096, 1024)
        self.opening = self.keys.opening("worker-1", seed_port=9)
        self.folder = Path(self.opening.folder)
        (self.folder / "root").write_text(self.published.root)
        self.events = RecordedEvents()
        self.announced: list[Announced] = []

    def client(
        self, behaviour: str, patience: Patience = FAST, opening: Open | None = None, port_before: int = 0
    ) -> RelayClient:
        return RelayClient(
            opening or self.opening, self.events, self.announced.append, port_before=port_before, patience=patience,
            program=(sys.executable, str(SCRIPT), behaviour),
        )  # fmt: skip

    def told(self, life: int = 0) -> list[str]:
        path = self.folder / "orders"
        lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()] if path.exists() else []
        return [line["order"] for line in lines if line["life"] == life]

    def processes(self) -> list[int]:
        return [int(path.read_text()) for path in sorted(self.folder.glob("life-*"))]

    def alive(self) -> list[int]:
        found = []
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, 0)
                found.append(process)
        return found

    def said(self, kind: str) -> list[dict[str, Any]]:
        """Fields of the events of a kind."""
        return [{k: v for k, v in e.items() if k not in ("at_s", "who", "kind")} for e in self.events.kinds(kind)]


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


async def soon(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_orders_reach_the_relay_and_words_come_back(stand: Stand) -> None:
    async with stand.client("brings") as relay:
        assert relay.port == 4001
        await relay.hold(["a" * 64])
        await relay.publish(stand.published.signed, stand.published.path)
        assert await relay.bring(stand.published.signed) == stand.folder / "object"
        await relay.withdraw("b" * 64)
        await soon(lambda: stand.announced)
        assert stand.announced == [Announced("b" * 64, Policy(0, 7))]
        assert relay.tally.progress == {"a" * 64: 0.5} and relay.tally.bound_s == 1.5
        assert stand.said("noted") == [{"path": str(stand.published.path), "omp": "1"}]
    assert stand.told() == ["Hold", "Publish", "Bring", "Withdraw"]
    assert not stand.alive()


async def test_a_relay_that_dies_is_told_everything_again_and_a_bring_goes_on(stand: Stand) -> None:
    async with stand.client("dies_once") as relay:
        await relay.hold(["a" * 64])
        await relay.expel("w7")
        await relay.publish(stand.published.signed, stand.published.path)
        await soon(lambda: relay.tally.sent_bytes == 10)
        port = relay.port
        assert await relay.bring(stand.published.signed) == stand.folder / "object"
        assert stand.told(life=1) == ["Expel", "Hold", "Publish", "Bring"]
        assert relay.port == port, "others know the old one"
        assert relay.restarts == 1
        await soon(lambda: relay.tally.sent_bytes == 20)  # counts of both lives
        assert relay.tally.received_bytes == 40 and relay.tally.reparentings == 2
    assert stand.said("relay_restarted") == [{"why": "exit code -9", "restarts": 1, "port": port}]
    assert not stand.alive()


async def test_what_was_withdrawn_is_not_told_again(stand: Stand) -> None:
    async with stand.client("dies_once") as relay:
        await relay.publish(stand.published.signed, stand.published.path)
        await relay.withdraw(stand.published.root)
        await relay.bring(stand.published.signed)
    assert stand.told(life=1) == ["Bring"]


@pytest.mark.parametrize("behaviour", ["freezes_once", "thread_dies_once"])
async def test_a_relay_that_works_no_more_is_replaced(stand: Stand, behaviour: str) -> None:
    patience = Patience(look_s=0.4, looks=3, first_pause_s=0.01)
    async with stand.client(behaviour, patience) as relay:
        assert await relay.bring(stand.published.signed) == stand.folder / "object"
        assert relay.restarts == 1
    assert not stand.alive()


async def test_i7_a_relay_that_keeps_dying_ends_every_wait_and_later_ones_do_not_begin(stand: Stand) -> None:
    patience = Patience(first_pause_s=0.01, most_pause_s=30.0, failures=2)
    async with stand.client("dies", patience) as relay:
        brings = [asyncio.create_task(relay.bring(stand.published.signed)) for _ in range(2)]
        for bring in brings:
            with pytest.raises(RelayStuck, match="keeps ending: exit code 9") as stuck:
                await bring
            assert stuck.value.path == stand.folder / stand.published.root
    assert len(stand.said("relay_down")) == 2
    assert not stand.alive()


async def test_i7_while_no_relay_process_lives_nobody_waits_for_one(stand: Stand) -> None:
    patience = Patience(first_pause_s=0.3, failures=1)
    async with stand.client("dies_once", patience) as relay:
        with pytest.raises(RelayStuck, match="keeps ending"):
            await relay.bring(stand.published.signed)
        with pytest.raises(RelayStuck, match="keeps ending"):
            await relay.bring(stand.published.signed)
        await soon(lambda: relay.restarts == 1)
        assert await relay.bring(stand.published.signed)


async def test_an_object_that_is_stuck_says_where_it_lies_and_may_be_brought_again(stand: Stand) -> None:
    async with stand.client("stuck") as relay:
        for _ in range(2):
            with pytest.raises(RelayStuck, match="nobody sends it") as stuck:
                await relay.bring(stand.published.signed)
            assert stuck.value.path == stand.folder / "object"
        assert isinstance(stuck.value, TransportError)
    assert stand.told() == ["Bring", "Bring"]


async def test_a_cancelled_bring_leaves_the_others_and_withdraw_ends_them(stand: Stand) -> None:
    async with stand.client("waits") as relay:
        first, second = (asyncio.create_task(relay.bring(stand.published.signed)) for _ in range(2))
        await soon(lambda: stand.told() == ["Bring", "Bring"])
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert not second.done()
        await relay.withdraw(stand.published.root)
        with pytest.raises(RelayStuck, match="withdrawn"):
            await second


async def test_leaving_ends_the_waits(stand: Stand) -> None:
    async with stand.client("waits") as relay:
        bring = asyncio.create_task(relay.bring(stand.published.signed))
        await soon(lambda: stand.told() == ["Bring"])
    with pytest.raises(RelayStuck, match="closed"):
        await bring
    assert not stand.alive()


async def test_an_error_inside_stays_what_it_is(stand: Stand) -> None:
    with pytest.raises(UserError, match="mine"):
        async with stand.client("brings"):
            raise UserError("mine")
    assert not stand.alive()


async def test_i6_a_manifest_of_another_key_is_not_brought(stand: Stand) -> None:
    forged = stand.keys.sign(stand.published.manifest, generate_key())
    async with stand.client("brings") as relay:
        with pytest.raises(IntegrityError, match="not signed by this run's key"):
            await relay.bring(forged)
        with pytest.raises(IntegrityError, match="not signed by this run's key"):
            await relay.publish(forged, stand.published.path)
    assert stand.told() == []


async def test_a_taken_port_is_the_users_mistake_in_one_sentence(stand: Stand) -> None:
    opening = msgspec.structs.replace(stand.opening, port=4100)
    with pytest.raises(UserError, match=r"must listen on port 4100 of 127.0.0.1, got: Address already in use"):
        await stand.client("port_taken", opening=opening).__aenter__()
    assert not stand.alive()


@pytest.mark.parametrize(("behaviour", "port"), [("brings", 4200), ("port_taken_first", 4002)])
async def test_the_port_of_an_earlier_life_is_taken_again_if_it_is_free(
    stand: Stand, behaviour: str, port: int
) -> None:
    async with stand.client(behaviour, port_before=4200) as relay:
        assert relay.port == port


async def test_when_somebody_took_the_free_port_meanwhile_another_is_found(stand: Stand) -> None:
    async with stand.client("port_taken_second") as relay:
        assert await relay.bring(stand.published.signed)
        assert relay.port == 4003
    assert "must listen on port 4001" in stand.said("relay_down")[1]["why"]
    assert not stand.alive()


@pytest.mark.parametrize(
    ("behaviour", "patience", "said"),
    [
        ("crashes", Patience(), "exit code 7 before it listened"),
        ("never_listens", Patience(start_s=1.0), "did not start within 1 s"),
    ],
)
async def test_i7_a_relay_that_does_not_start_is_an_error_after_a_while(
    stand: Stand, behaviour: str, patience: Patience, said: str
) -> None:
    with pytest.raises(TransportError, match=said):
        await stand.client(behaviour, patience).__aenter__()
    assert not stand.alive()


async def test_a_relay_that_does_not_end_when_told_is_made_to(stand: Stand) -> None:
    async with asyncio.timeout(10):
        async with stand.client("deaf", Patience(end_s=0.2)) as relay:
            await relay.bring(stand.published.signed)
    assert not stand.alive()


async def test_prints_of_a_library_do_not_disturb_the_words(stand: Stand) -> None:
    async with stand.client("babbles") as relay:
        assert await relay.bring(stand.published.signed) == stand.folder / "object"
        assert relay.restarts == 0


async def test_i7_an_order_that_is_refused_is_an_event_and_no_wait_goes_on_for_ever(stand: Stand) -> None:
    async with stand.client("refuses") as relay:
        with pytest.raises(RelayStuck, match="not today"):
            await relay.bring(stand.published.signed)
        await relay.withdraw("b" * 64)
        await soon(lambda: stand.announced)
    assert stand.said("relay_order_failed") == [{"order": "Bring", "error": "not today"}]


# ---- real relays ----------------------------------------------------------------------------------------------------


async def test_real_relays_bring_an_object_bit_exact_and_one_that_is_killed_comes_back(tmp_path: Path) -> None:
    keys, events = RunKeys(tmp_path), RecordedEvents()
    published, next_one = keys.publish(1, 4 * 1024 * 1024), keys.publish(2, 1024 * 1024)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(50):
        seed = await stack.enter_async_context(RelayClient(keys.opening(), events, patience=FAST))
        nodes = [
            await stack.enter_async_context(RelayClient(keys.opening(f"w{n}", seed.port), events, patience=FAST))
            for n in range(3)
        ]
        await seed.publish(published.signed, published.path)
        paths = await asyncio.gather(*(node.bring(published.signed) for node in nodes))
        assert [path.read_bytes() == published.content for path in paths] == [True] * 3
        assert len(set(paths)) == 3

        for relay in (nodes[0], seed):
            assert relay._child is not None
            os.kill(relay._child._process.pid, 9)
        await seed.publish(next_one.signed, next_one.path)
        paths = await asyncio.gather(*(node.bring(next_one.signed) for node in nodes))
        assert [path.read_bytes() == next_one.content for path in paths] == [True] * 3
        assert (seed.restarts, nodes[0].restarts) == (1, 1)
        assert await nodes[0].bring(published.signed) == tmp_path / "relays" / "w0" / published.root  # still there
        await nodes[0].withdraw(published.root)
        await soon(lambda: not (tmp_path / "relays" / "w0" / published.root).exists())

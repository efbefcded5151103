"""What a learner may say, and what an older one may not any more (PROTOCOL §2)."""

from __future__ import annotations

import msgspec
import pytest
from desks import LEARNER, attach, coordinator, generate

from echo2.broadcast.parse import encode_manifest
from echo2.errors import Fenced, Refused
from echo2.simulation.loop import run_virtual
from echo2.simulation.memory import MemoryStore
from echo2.simulation.snapshots import modelled_snapshot
from echo2.transport.messages import (
    AckCheckpoint,
    BatchReply,
    Leave,
    OfferSnapshot,
    PublishSnapshot,
    ReportStep,
    Request,
    RequestBatch,
)
from echo2.types import Policy


@pytest.mark.parametrize(
    "late",
    [
        lambda epoch: RequestBatch(epoch, 0, 1.0),
        lambda epoch: ReportStep(epoch, 0, 1.0, 0.0, {}),
        lambda epoch: AckCheckpoint(epoch, 0),
        lambda epoch: OfferSnapshot(epoch, encode_manifest(modelled_snapshot("run", Policy(0, 0), "bfloat16", "w")[0])),
        lambda epoch: PublishSnapshot(epoch, Policy(0, 0), "0" * 64),
        lambda epoch: Leave(epoch),
    ],
)
def test_whatever_a_replaced_learner_still_says_is_fenced(late: object) -> None:
    assert callable(late)
    said: Request

    async def main() -> None:
        nonlocal said
        made = await coordinator()
        old = await attach(made)
        await attach(made)
        said = late(old)
        with pytest.raises(Fenced, match="a newer learner has attached"):
            await made.handle(LEARNER, said)
        assert made.books.learner_attached, "the new one is still here"

    run_virtual(main())


def test_a_batch_that_nobody_may_ask_for_is_refused_in_a_sentence() -> None:
    async def main() -> None:
        made = await coordinator()
        epoch = await attach(made)
        with pytest.raises(Refused, match="batch 0 is next after 0 reported steps, got 5"):
            await made.handle(LEARNER, RequestBatch(epoch, 5, 1.0))

    run_virtual(main())


def test_a_restarted_coordinator_knows_that_its_learner_is_still_there() -> None:
    """A learner attaches once; its next message finds a coordinator that must wait for it at the end and bill it."""

    async def main() -> None:
        store = MemoryStore(0.0)
        first = await coordinator(store, provisioning={"learner_usd_per_h": 3.6})
        epoch = await attach(first)
        await first.handle(LEARNER, AckCheckpoint(epoch, 0))
        second = await coordinator(store, provisioning={"learner_usd_per_h": 3.6})
        assert not second.books.learner_attached
        await generate(second, 2)
        batch = await second.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        assert isinstance(batch, BatchReply)
        assert second.books.learner_attached
        assert second.books.bill.usd_per_h == pytest.approx(3.6)
        await second.handle(LEARNER, Leave(epoch))
        with pytest.raises(Refused):
            await second.handle(LEARNER, RequestBatch(epoch, 7, 1.0))  # late
        assert not second.books.learner_attached, "who has left does not come back by a late message"

    run_virtual(main())


@pytest.mark.parametrize("wrong", [{"run_id": "another"}, {"dtype": "float32"}])
def test_a_snapshot_that_every_worker_would_refuse_is_not_taken_in(wrong: dict[str, str]) -> None:
    async def main() -> None:
        made = await coordinator()
        epoch = await attach(made)
        terms = {"run_id": "run", "dtype": "bfloat16", **wrong}
        manifest, _ = modelled_snapshot(terms["run_id"], Policy(0, 0), terms["dtype"], "w")
        await made.handle(LEARNER, AckCheckpoint(epoch, 0))
        with pytest.raises(Refused, match="a snapshot of this run is of run and bfloat16"):
            await made.handle(LEARNER, OfferSnapshot(epoch, encode_manifest(manifest)))

    run_virtual(main())


def test_a_report_of_the_shortest_possible_step_still_makes_a_line() -> None:
    async def main() -> None:
        made = await coordinator()
        epoch = await attach(made)
        await generate(made, 2)
        await made.handle(LEARNER, RequestBatch(epoch, 0, 1.0))
        await made.handle(LEARNER, ReportStep(epoch, 0, 0.0, 0.0, {"loss": float("nan")}))
        line = made.last_metrics
        assert line is not None
        assert msgspec.json.decode(msgspec.json.encode(line), type=type(line)) == line
        assert line.learner == {}

    run_virtual(main())

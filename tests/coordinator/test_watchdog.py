"""I7 and field report D07: nobody waits for ever, and the sentence names the starved side."""

from __future__ import annotations

import msgspec
import pytest

from echo2.coordinator.watchdog import Progress, starved

FINE = Progress(
    rows_s=1.0, learner_s=1.0, learner_attached=True, learner_waits=False, published=True, workers_active=2,
    batch="batch 3 has 1 of 4 groups", t_train_s=2.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"learner_attached": False, "learner_s": 11.0}, "no learner has attached for 11 s"),
        ({"published": False, "learner_s": 11.0}, "published version 0"),
        ({"learner_waits": True, "rows_s": 11.0, "workers_active": 0}, "no worker is alive"),
        (
            {"learner_waits": True, "rows_s": 11.0, "workers_active": 0, "set_aside": "ada: its log-probs differ"},
            "no worker is alive; the last one that was set aside is ada: its log-probs differ",
        ),
        ({"learner_waits": True, "rows_s": 11.0}, "batch 3 has 1 of 4 groups; 2 workers are alive"),
        ({"learner_s": 21.0}, "held a batch for 21 s"),
        ({"learner_s": 61.0, "t_train_s": None}, "held a batch for 61 s"),
        ({"learner_waits": True, "rows_s": 200.0, "learner_s": 121.0}, "silent since it asked for a batch for 121 s"),
    ],
)
def test_the_starved_side_is_named(changes: dict[str, object], sentence: str) -> None:
    found = starved(msgspec.structs.replace(FINE, **changes), stall_s=10.0)
    assert found is not None
    assert sentence in found


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"learner_waits": True, "rows_s": 9.0},
        {"rows_s": 1e6},
        {"learner_s": 19.0},
        {"learner_s": 59.0, "t_train_s": None},
    ],
)
def test_nobody_is_blamed_within_their_time(changes: dict[str, object]) -> None:
    assert starved(msgspec.structs.replace(FINE, **changes), stall_s=10.0) is None

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from building import row, trajectory

from echo2.config.sections import TaskSection
from echo2.data import rescoring
from echo2.data.registry import load_task
from echo2.data.rescoring import Docket, is_drawn, is_verifiable
from echo2.data.task import Score, Task
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.transport.messages import RowSubmission, SubmitGroup
from echo2.types import Prompt, Segment, Verdict, pack_tokens

ABOUT = Prompt("arithmetic/train/0", "arithmetic", {"question": "1+1", "gold": "2"})


def task(name: str, **options: Any) -> Task:
    return load_task(TaskSection(name=name, options=options))


def docket(share: float = 1.0, secret: str = "s") -> Docket:
    return Docket({"arithmetic": task("arithmetic")}, share, secret)


def submission(*rows: RowSubmission, lease: str = "l1") -> SubmitGroup:
    return SubmitGroup(lease, 0, 1, rows)


def test_single_replies_can_be_verified_and_games_and_what_says_no_cannot() -> None:
    class ByChance(Arithmetic):
        verifiable = False

    assert is_verifiable(task("arithmetic"))
    assert not is_verifiable(task("sandbox", sandbox="moba"))
    assert not is_verifiable(ByChance())


def test_a_share_is_drawn_by_a_secret() -> None:
    drawn = {secret: {i for i in range(4000) if is_drawn(secret, f"lease-{i}", 0, 0.05)} for secret in ("a", "b")}
    assert 120 < len(drawn["a"]) < 290
    assert drawn["a"] != drawn["b"]
    assert all(is_drawn("a", f"lease-{i}", i, 1.0) for i in range(100))
    assert not any(is_drawn("a", f"lease-{i}", i, 0.0) for i in range(100))


def test_a_claim_is_every_token_that_was_sampled_about_the_prompt_that_was_leased() -> None:
    """A reply in two pieces is no way to hide half of it."""
    record = trajectory(ABOUT, reward=0.5, reply=(50, 257))
    extra = (Segment(pack_tokens([9]), sampled=False), Segment(pack_tokens([51]), sampled=True))
    record = msgspec.structs.replace(record, segments=record.segments + extra, omega={"status": "so-so"})
    made = docket()
    made.put("w", ABOUT, submission(row(3, record), row(4, record)), [Verdict.ACCEPTED, Verdict.DUPLICATE])
    claim = made.take()
    assert claim is not None
    assert (claim.reply, claim.score, claim.index) == (pack_tokens([50, 257, 51]), Score(0.5, "so-so"), 3)
    assert (claim.worker_id, claim.lease_id, claim.prompt) == ("w", "l1", ABOUT)
    assert made.take() is None


def test_what_waits_is_bounded_and_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rescoring, "MOST_WAITING", 3)
    made = docket()
    for number in range(5):
        made.put(f"w{number % 2}", ABOUT, submission(row(number, trajectory(ABOUT))), [Verdict.ACCEPTED])
    assert len(made) == 3
    made.forget_worker("w0")
    assert [claim.index for claim in iter(made.take, None)] == [1]
    monkeypatch.setattr(rescoring, "MOST_WAITING_BYTES", 20)
    for number in range(5):
        made.put("w", ABOUT, submission(row(number, trajectory(ABOUT))), [Verdict.ACCEPTED])
    assert len(made) == 1, "twelve bytes each"
    made.forget_task("arithmetic")
    made.put("w", ABOUT, submission(row(9, trajectory(ABOUT))), [Verdict.ACCEPTED])
    assert len(made) == 0
    other = docket()
    other.close()
    other.put("w", ABOUT, submission(row(0, trajectory(ABOUT))), [Verdict.ACCEPTED])
    assert len(other) == 0


def test_rewards_agree_but_for_rounding_and_what_was_too_costly_proves_nothing() -> None:
    plain, maths = task("arithmetic"), task("maths", path="unread.jsonl")
    assert plain.agrees(Score(1 / 3, "x"), Score(0.33333333333, "x"))
    assert not plain.agrees(Score(0.0, "wrong"), Score(1.0, "correct"))
    assert maths.agrees(Score(0.0, "too_costly"), Score(1.0, "correct")), "this machine is the slower one"
    assert maths.agrees(Score(1.0, "correct"), Score(0.0, "too_costly")), "the other is"
    assert not maths.agrees(Score(0.0, "wrong"), Score(1.0, "too_costly")), "a word excuses no reward"

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2.report.transcripts import choose, shorten, transcript
from echo2.types import FinishReason, Policy, Segment, Trajectory, pack_tokens


def letters(token_ids: Sequence[int]) -> str:
    return "".join(chr(token) for token in token_ids)


def test_a_trajectory_reads_as_its_turns_in_order() -> None:
    trajectory = Trajectory(
        task="arithmetic",
        prompt_id="p-1",
        segments=(
            Segment(pack_tokens([ord(c) for c in "3+4="]), sampled=False),
            Segment(pack_tokens([ord("7")]), sampled=True),
        ),
        reward=1.0,
        policy_min=Policy(0, 4),
        policy_max=Policy(0, 5),
        finish_reason=FinishReason.STOP,
    )
    shown = transcript(trajectory, step=6, decode=letters)
    assert [(turn.sampled, turn.text) for turn in shown.turns] == [(False, "3+4="), (True, "7")]
    assert (shown.staleness, shown.sampled_tokens, shown.policy) == (2, 1, Policy(0, 4))


def test_the_best_and_the_worst_are_shown_first() -> None:
    assert choose([0.0, 1.0, 0.5, 0.2], 2) == [1, 0]
    assert choose([0.0, 1.0, 0.5, 0.2], 1) == [1]
    assert choose([0.0, 1.0], 9) == [1, 0]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1, 1), max_size=40), st.integers(0, 12))
def test_a_choice_names_distinct_rows_and_no_more_than_asked(rewards: list[float], count: int) -> None:
    chosen = choose(rewards, count)
    assert len(chosen) == len(set(chosen)) == min(count, len(rewards))
    assert all(0 <= index < len(rewards) for index in chosen)
    assert [rewards[index] for index in chosen] == sorted((rewards[index] for index in chosen), reverse=True)


def test_a_long_turn_loses_its_middle_and_says_so() -> None:
    assert shorten("abcdefghij", 4) == "ab\n[… 6 characters left out …]\nij"
    assert shorten("abcd", 4) == "abcd"

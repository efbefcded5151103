from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from echo2.rollout.engines.servers.rows import Answer, Row, row_seed
from echo2.types import FinishReason, Policy, Sampling

V0, V1 = Policy(0, 0), Policy(0, 1)


def sampling(limit: int = 8, stops: tuple[int, ...] = (9,)) -> Sampling:
    return Sampling(1.0, 1.0, limit, 3, stops)


def test_a_row_that_was_halted_goes_on_from_its_tokens_with_draws_of_its_own() -> None:
    row = Row([1, 2], sampling(), 0, None)
    first = row.question("m", "a")
    row.take(Answer((4, 5), (-0.1, -0.2), "abort"), V0)
    second = row.question("m", "b")
    row.take(Answer((6, 9), (-0.3, -0.4), "stop"), V1)
    assert (first.token_ids, first.sampling.max_new_tokens) == ((1, 2), 8)
    assert (second.token_ids, second.sampling.max_new_tokens, second.label) == ((1, 2, 4, 5), 6, "b")
    assert first.sampling.seed != second.sampling.seed
    said = row.completion()
    assert (said.token_ids, said.logprobs, said.versions) == ((4, 5, 6, 9), (-0.1, -0.2, -0.3, -0.4), (0, 0, 1, 1))
    assert (said.policy_min, said.policy_max, said.finish_reason) == (V0, V1, FinishReason.STOP)


def test_an_end_that_nobody_asked_for_is_gone_on_with() -> None:
    """A server may end at the tokenizer's own end token."""
    row = Row([1], sampling(), 0, None)
    row.take(Answer((4, 2), (-0.1, -0.2), "stop"), V0)
    assert not row.ended
    row.take(Answer((3,) * 6, (-0.1,) * 6, "length"), V0)
    assert row.completion().finish_reason is FinishReason.LENGTH


def test_a_part_without_logprobs_leaves_the_whole_without() -> None:
    row = Row([1], sampling(3), 0, 2)
    assert row.is_cut_by_context
    row.take(Answer((4,), (-0.1,), "abort"), V0)
    row.take(Answer((5,), None, "length"), V0)
    assert row.completion().logprobs is None


def test_rounding_above_nothing_is_nothing() -> None:
    row = Row([1], sampling(1), 0, None)
    row.take(Answer((4,), (1e-6,), "length"), V0)
    assert row.completion().logprobs == (0.0,)


@given(st.integers(0, 2**53), st.integers(0, 64), st.integers(0, 4096))
def test_seeds_are_what_every_server_takes_and_neighbours_differ(seed: int, position: int, done: int) -> None:
    own = row_seed(seed, position, done)
    assert 0 <= own < 2**31
    assert own == row_seed(seed, position, done)
    assert len({own, row_seed(seed + 1, position, done), row_seed(seed, position + 1, done)}) == 3

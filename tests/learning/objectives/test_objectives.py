"""What holds for every objective."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from token_terms import Row, update

from echo2.config.objectives import CHOOSABLE, OBJECTIVE_KEYS
from echo2.config.root import Config
from echo2.config.sections import LearningSection
from echo2.errors import ConfigError
from echo2.learning.objectives import OBJECTIVES, ObjectiveSettings, configured, find_objective

NAMES = sorted(OBJECTIVES)
EXTREME = st.floats(-1e4, 1e4, width=32)
PLAUSIBLE = st.floats(-6.0, -0.0625, width=32)


def rows(logps: st.SearchStrategy[float], advantages: st.SearchStrategy[float]) -> st.SearchStrategy[list[Row]]:
    def row(length: int) -> st.SearchStrategy[Row]:
        values = st.lists(logps, min_size=length, max_size=length)
        flags = st.lists(st.booleans(), min_size=length, max_size=length)
        return st.builds(
            Row, logp=values, prox=values, behaviour=values, ref=values, mask=flags, advantage=advantages,
            known=st.booleans(), current=st.booleans(), nucleus=st.booleans(), group=st.integers(0, 2),
        )  # fmt: skip

    return st.lists(st.integers(1, 4).flatmap(row), min_size=1, max_size=5)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=20, deadline=None)
@given(drawn=rows(EXTREME, st.floats(-1e6, 1e6, width=32)), estimator=st.sampled_from(["k1", "k2", "k3"]))
def test_finite_inputs_never_give_nan_or_infinity(name: str, drawn: list[Row], estimator: Any) -> None:
    """Log-ratios up to ±2·10⁴, empty masks, rows of one token."""
    found = update(name, drawn, ObjectiveSettings(kl_beta=0.1, kl_estimator=estimator))
    values = [found.loss, *found.sums.values(), *(value for row in found.gradients for value in row)]
    assert all(math.isfinite(value) for value in values)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=12, deadline=None)
@given(drawn=rows(PLAUSIBLE, st.floats(-3, 3, width=32)), data=st.data())
def test_c04_no_split_into_micro_batches_and_no_order_changes_loss_or_gradient(
    name: str, drawn: list[Row], data: st.DataObject
) -> None:
    order = data.draw(st.permutations(range(len(drawn))))
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(drawn) - 1)))) & set(range(1, len(drawn))))
    parts = [order[a:b] for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    given_settings = ObjectiveSettings(kl_beta=0.1, longest_reply=7)
    whole, split = (update(name, drawn, given_settings, parts=way) for way in (None, parts))
    assert split.loss == pytest.approx(whole.loss, rel=1e-4, abs=1e-5)
    assert split.sums == pytest.approx(whole.sums, rel=1e-4, abs=1e-5)
    for one, other in zip(split.gradients, whole.gradients, strict=True):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", sorted({*NAMES} - {"gepo"}))
def test_on_policy_the_gradient_is_the_plain_policy_gradient(name: str) -> None:
    """-A of each token over the normaliser: 3 tokens, 2 rows of 2 and 1 tokens, or 2 rows of 10.

    Not so for gepo, whose ratio compares a reply with its group: see its own tests.
    """
    drawn = [Row(logp=[-1.0, -2.0], advantage=1.5), Row(logp=[-0.5], advantage=-0.5)]
    expected = {"tokens": ([-0.5, -0.5], [0.5 / 3]), "rows": ([-0.375, -0.375], [0.25])}
    expected["constant"] = ([-1.5 / 20, -1.5 / 20], [0.5 / 20])
    for current in (True, False):
        sampled = [Row(**(vars(row) | {"current": current})) for row in drawn]
        found = update(name, sampled, ObjectiveSettings(longest_reply=10))
        first, second = expected[OBJECTIVES[name].mean]
        assert found.gradients[0] == pytest.approx(first, rel=1e-5)
        assert found.gradients[1] == pytest.approx(second, rel=1e-5)
        assert found.sums["ratio"] == pytest.approx(3.0)
        assert found.sums["clipped"] == 0


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(drawn=rows(PLAUSIBLE, st.just(0.0)))
def test_without_advantage_and_kl_there_is_no_gradient(name: str, drawn: list[Row]) -> None:
    found = update(name, drawn)
    assert all(value == 0.0 for row in found.gradients for value in row)
    assert found.loss == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_kl_term_holds_where_the_advantage_is_zero(name: str) -> None:
    """k2 of a difference of 2 is 2, its gradient 2; fresh data, so w = 1."""
    drawn = [Row(logp=[-1.0], ref=[-3.0], advantage=0.0, current=True)]
    found = update(name, drawn, ObjectiveSettings(kl_beta=0.5, kl_estimator="k2"))
    assert found.loss == pytest.approx(1.0)
    assert found.gradients == [[pytest.approx(1.0)]]


@pytest.mark.parametrize("name", [name for name in NAMES if OBJECTIVES[name].mean == "rows"])
def test_approximate_log_probs_never_enter_ratios_of_whole_rows(name: str) -> None:
    def drawn(reported: float) -> list[Row]:
        nucleus = Row(logp=[-1.0, -2.0], behaviour=[reported, reported], nucleus=True)
        return [nucleus, Row(logp=[-1.5], behaviour=[-1.4])]

    assert update(name, drawn(-1.0)) == update(name, drawn(-9.0))


class Watched(ObjectiveSettings):
    """Notes which of its values are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ObjectiveSettings.__dataclass_fields__:
            READ.add(name)
        return super().__getattribute__(name)


READ: set[str] = set()


@pytest.mark.parametrize("name", NAMES)
def test_an_objective_reads_the_keys_that_its_configuration_offers_and_no_other(name: str) -> None:
    READ.clear()
    update(name, [Row(logp=[-1.0, -2.0], prox=[-1.5, -1.0], behaviour=[-2.0, -2.5], ref=[-1.0, -1.0])], Watched())
    offered = OBJECTIVE_KEYS[name].keys() & ObjectiveSettings.__dataclass_fields__.keys()
    assert READ - {"kl_beta", "kl_estimator", "longest_reply"} == offered


def test_the_configuration_knows_every_objective_and_every_key_it_leaves_open() -> None:
    literal = get_args(LearningSection.model_fields["objective"].annotation)
    assert set(literal) == OBJECTIVES.keys() == OBJECTIVE_KEYS.keys()
    fields = LearningSection.model_fields
    assert {key for key in CHOOSABLE if fields[key].default is None} == set(CHOOSABLE)
    for name in literal:
        section = LearningSection(objective=name)
        assert {key: section.settled(key) for key in OBJECTIVE_KEYS[name]} == dict(OBJECTIVE_KEYS[name])


def test_what_the_configuration_leaves_open_is_the_objectives_own() -> None:
    def made(**learning: Any) -> ObjectiveSettings:
        return configured(Config.model_validate({"learning": learning}))[1]

    gspo = made(objective="gspo")
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert made(objective="gspo", clip_low=0.1).clip_low == 0.1
    assert made(objective="dapo").clip_high == 0.28
    assert made(objective="dr_grpo").longest_reply == 256


def test_an_unknown_objective_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"one of grpo, grpo_paper, .*, got 'ppo'"):
        find_objective("ppo")


def test_the_page_of_objectives_has_every_objective_with_its_defaults() -> None:
    page = (Path(__file__).parents[3] / "docs" / "objectives.md").read_text(encoding="utf-8")
    tables = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines() if line.startswith("| ")]
    (header,) = (cells for cells in tables if cells[:2] == ["objective", "clip_low"])
    shown = {
        cells[0].strip("`"): {key: cell for key, cell in zip(header[1:], cells[1:], strict=True) if cell}
        for cells in tables
        if len(cells) == len(header) and cells is not header
    }
    assert shown == {name: {key: str(value) for key, value in keys.items()} for name, keys in OBJECTIVE_KEYS.items()}
    for name in NAMES:
        assert page.count(f"`{name}`") >= 3, f"{name} needs a use, a formula and its defaults"

from __future__ import annotations

import builtins
import ctypes
import math
from random import Random
from typing import Any

import pytest

from echo2.errors import UserError
from echo2.provisioning.offers import Offer
from echo2.provisioning.selection import cheapest, exact, greedy


def market(seed: int, size: int) -> list[Offer]:
    draw = Random(seed)
    return [
        Offer(
            name=f"o{index}",
            gpu="G",
            count=draw.randint(1, 3),
            usd_per_h=round(draw.uniform(0.1, 4.0), 2),
            rollouts_per_s=round(draw.uniform(0.05, 2.0), 2),
        )
        for index in range(size)
    ]


def least_cost_in_cents(offers: list[Offer], target_hundredths: int) -> int:
    """By dynamic programming over hundredths of a trajectory per second, in whole numbers."""
    least = [0] + [10**9] * target_hundredths
    for offer in offers:
        cents, hundredths = round(offer.usd_per_h * 100), round(offer.rollouts_per_s * 100)
        for _ in range(offer.count):
            least = [
                min(cost, least[max(0, reached - hundredths)] + cents) if reached else 0
                for reached, cost in enumerate(least)
            ]
    return least[target_hundredths]


@pytest.mark.parametrize("seed", range(12))
def test_the_exact_policy_finds_the_optimum(seed: int) -> None:
    pytest.importorskip("scipy")
    offers = market(seed, 12)
    reach = math.fsum(offer.count * offer.rollouts_per_s for offer in offers)
    hundredths = math.floor(reach * 100 * (0.02 + 0.07 * seed))
    least = least_cost_in_cents(offers, hundredths) / 100
    chosen = exact(offers, hundredths / 100)
    assert chosen.usd_per_h == pytest.approx(least, rel=1e-9)
    assert chosen.mu_per_s >= hundredths / 100 * (1 - 1e-8)
    assert least * (1 - 1e-9) <= cheapest(offers, hundredths / 100).usd_per_h <= least * 1.01
    assert least * (1 - 1e-9) <= greedy(offers, hundredths / 100).usd_per_h


def test_the_order_of_offers_does_not_matter_to_the_solver() -> None:
    pytest.importorskip("scipy")
    offers = market(3, 30)
    assert exact(offers[::-1], 7.77) == exact(offers, 7.77)


def test_what_the_solver_prints_goes_to_standard_error(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """HiGHS prints "transformNewIntegerFeasibleSolution" for some markets, from C and whatever its options."""
    optimize = pytest.importorskip("scipy.optimize")
    solve = optimize.milp

    def talkative(*arguments: Any, **options: Any) -> Any:
        ctypes.CDLL(None).puts(b"from C")
        return solve(*arguments, **options)

    monkeypatch.setattr(optimize, "milp", talkative)
    exact(market(0, 5), 1.0)
    print("ours")
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("ours\n", "from C\n")


def test_without_a_proof_in_time_there_is_no_answer() -> None:
    pytest.importorskip("scipy")
    with pytest.raises(UserError, match=r"must prove its answer within 0 s, and did not for 400 offers .*: choose"):
        exact(market(0, 400), 123.45, limit_s=0.0)


def test_without_scipy_the_exact_policy_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("scipy"):
            raise ModuleNotFoundError("No module named 'scipy'", name="scipy")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"must have SciPy, .* run: pip install 'echo2\[exact\]'"):
        exact(market(0, 3), 0.1)

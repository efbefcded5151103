"""Equation (3) by SciPy's HiGHS: the one place that calls the solver.

Invariant: standard output stays untouched. HiGHS prints a line of its own now and then, from C and whatever its options
say; it goes to standard error, since ``--json`` promises one object on standard output and nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

import numpy as np

from echo2.errors import UserError
from echo2.provisioning.knapsack import SLACK, Counts, Floats, improving_range

_SCALE = 1e4
"""HiGHS lets a row miss its bound by 1e-6 and proves optima to 1e-6, both absolute; at this scale neither matters."""


def least_cover(costs: Floats, rates: Floats, counts: Counts, limit_s: float) -> list[int]:
    """The units of each offer that cover a total rate of 1 at the least cost, where a choice of cost 1 is known.

    Offers come in the order of rising cost/rate. Only choices that could beat the known one are left to the solver: of
    10,000 offers some hundred. What comes back may miss the rate by the solver's tolerance: the caller checks.
    Raises UserError when SciPy is not installed or ``limit_s`` passes without a proof.
    """
    try:
        from scipy.optimize import Bounds, LinearConstraint, milp
    except ModuleNotFoundError as error:
        raise UserError(
            f"the policy exact must have SciPy, and {error.name} is not installed; run: pip install 'echo2[exact]', "
            "or choose the policy cheapest"
        ) from error
    least, most = improving_range(costs, rates, counts, 1.0)
    with _output_to_standard_error():
        result = milp(
            c=costs * _SCALE,
            integrality=np.ones(len(rates)),
            bounds=Bounds(least, most),
            constraints=LinearConstraint(rates[np.newaxis] * _SCALE, lb=_SCALE * (1 - SLACK)),
            options={"time_limit": limit_s, "mip_rel_gap": 0.0},
        )
    if result.status != 0:
        raise UserError(
            f"the policy exact must prove its answer within {limit_s:g} s, and did not for {len(rates)} offers "
            f"({result.message.strip()}): choose the policy cheapest"
        )
    return [round(units) for units in result.x]


@contextlib.contextmanager
def _output_to_standard_error() -> Iterator[None]:
    """What C code prints on standard output goes to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).fflush(None)  # what C still holds back would come out after the change back
        os.dup2(kept, 1)
        os.close(kept)

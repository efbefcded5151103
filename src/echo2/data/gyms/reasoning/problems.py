"""What the process that holds reasoning-gym does with it; nothing else imports the library.

Invariant: problem ``index`` of a split follows from environment, configuration, seed and index: the library's global
generators are seeded for each problem, and the process fixes the order of sets (``PYTHONHASHSEED``). A question belongs
to one split by its own text, so no question that is held out is ever trained on, under whatever number it comes.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from functools import lru_cache
from typing import Any

from echo2.data.gyms.reasoning import guards
from echo2.data.gyms.reasoning.messages import Ask, Check, Judge, Make, Names
from echo2.data.gyms.reasoning.plain import plain, restored

HELD_OUT_SHARE = 4
"""One question in four is held out: what a split passes over is made in vain, and some are slow to make."""
STRIDES = {False: 4, True: 16}
"""Numbers between the first candidates of neighbouring indices, by whether they are held out; few need more."""
MOST_CANDIDATES = 256
TOGETHER = 64
"""Problems of one instance of the library's data set; several of them make plans for all when they are opened."""
_SEEDS = 2**31
_EXAMPLES = ("example_correct_answer", "example_answer", "possible_answer")
"""Where the library keeps one right answer of many in metadata."""


def install() -> None:
    """Import the library with its evaluations guarded; once, before anything else here."""
    import sympy
    from sympy.parsing import sympy_parser

    sympy_parser.parse_expr = sympy.parse_expr = guards.guarded(sympy_parser.parse_expr)
    import reasoning_gym  # noqa: F401

    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "reasoning_gym" and getattr(module, "__dict__", None) is not None:
            module.__dict__.setdefault("eval", guards.literal)


def answer(ask: Ask) -> Any:
    """What was asked for; whatever the library raises goes through."""
    if isinstance(ask, Names):
        from reasoning_gym.factory import DATASETS

        return sorted(DATASETS)
    if isinstance(ask, Check):
        return _fault(ask)
    if isinstance(ask, Make):
        return _made(ask)
    assert isinstance(ask, Judge), "the four kinds"
    problem = restored(ask.problem)
    score = float(_data_set(ask.environment, _key(ask.config), 0).score_answer(ask.answer, problem))
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        raise ValueError(f"a score of {ask.environment} must be in [0, 1], got {score}")
    return score


def _fault(ask: Check) -> str | None:
    try:
        _data_set(ask.environment, _key(ask.config), 0)
    except (AssertionError, ValueError, TypeError, KeyError) as error:
        return " ".join(f"{type(error).__name__}: {error}".split())
    return None


def _made(ask: Make) -> dict[str, Any]:
    first = ask.index * STRIDES[ask.held_out]
    for number in range(first, first + MOST_CANDIDATES):
        problem = _problem(ask.environment, _key(ask.config), _base(ask.seed) + number)
        if _is_held_out(problem["question"]) == ask.held_out:
            return problem | {"number": number}
    raise ValueError(
        f"{ask.environment} must have enough different questions to hold some out, "
        f"{MOST_CANDIDATES} in a row were of the other split; widen its config"
    )


def _problem(environment: str, config: str, position: int) -> dict[str, Any]:
    start = position - position % TOGETHER
    random.seed(f"{environment}/{position}")
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(position % 2**32)
    entry = _data_set(environment, config, start)[position - start]
    metadata = entry["metadata"]
    gold = entry["answer"]
    example = next((metadata[key] for key in _EXAMPLES if metadata.get(key) is not None), None)
    return {
        "question": str(entry["question"]),
        "answer": plain(gold),
        "metadata": plain(metadata),
        "gold": gold if isinstance(gold, str) else _written(example),
    }


def _written(example: Any) -> str | None:
    """A right answer that is data, as a reply writes it."""
    if example is None or isinstance(example, str):
        return example
    return json.dumps(example)


@lru_cache(maxsize=8)
def _data_set(environment: str, config: str, start: int) -> Any:
    from reasoning_gym import create_dataset

    options = json.loads(config)
    if environment == "composite":
        from reasoning_gym.composite import DatasetSpec

        options["datasets"] = [DatasetSpec(**{"weight": 1.0, "config": {}, **part}) for part in options["datasets"]]
    return create_dataset(environment, **options, seed=start % _SEEDS, size=TOGETHER)


def _key(config: dict[str, Any]) -> str:
    return json.dumps(config, sort_keys=True)


def _base(seed: int) -> int:
    """Where a seed's problems start; neighbouring seeds lie far apart."""
    digest = hashlib.blake2b(f"echo2/{seed}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") // TOGETHER * TOGETHER % _SEEDS


def _is_held_out(question: str) -> bool:
    digest = hashlib.blake2b(" ".join(question.split()).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % HELD_OUT_SHARE == 0

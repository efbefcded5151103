"""Sums of two numbers, made on the spot.

Invariant: problem ``index`` of a split follows from the options alone; one problem in eight is held out for evaluation,
so no evaluated problem is ever trained on (below ``MIN_HELD_OUT_SPACE`` problems both splits share them all).
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from math import gcd
from typing import Any, Literal, get_args

from echo2.data.answers import IntegerAnswerTask
from echo2.data.task import Message, Split
from echo2.errors import ConfigError
from echo2.types import Prompt

Style = Literal["words", "symbols"]

MIN_HELD_OUT_SPACE = 64
HELD_OUT_SHARE = 8
MAX_OPERAND = 10**9
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*"}


class Arithmetic(IntegerAnswerTask):
    """Operands are drawn from [min_operand, max_operand].

    operations: any of add, subtract, multiply. style: ``words`` asks an instruct model in a sentence, ``symbols`` is
    the bare ``a+b=`` for a model that knows only characters. seed: which problems are held out, and the order of all.
    """

    def __init__(
        self,
        *,
        min_operand: int = 0,
        max_operand: int = 9,
        operations: list[str] | tuple[str, ...] = ("add",),
        style: Style = "words",
        seed: int = 0,
    ) -> None:
        faults = [
            f"arithmetic: {name} must be an integer in [0, {MAX_OPERAND}], got {value!r}"
            for name, value in (("min_operand", min_operand), ("max_operand", max_operand))
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_OPERAND
        ]
        if not faults and min_operand > max_operand:
            faults.append(f"arithmetic: min_operand must be at most max_operand, got {min_operand} and {max_operand}")
        if not isinstance(operations, list | tuple) or not operations or not set(operations) <= _SIGNS.keys():
            faults.append(f"arithmetic: operations must be a list of {', '.join(_SIGNS)}, got {operations!r}")
        if style not in get_args(Style):
            faults.append(f"arithmetic: style must be words or symbols, got {style!r}")
        if not isinstance(seed, int) or isinstance(seed, bool):
            faults.append(f"arithmetic: seed must be an integer, got {seed!r}")
        if faults:
            raise ConfigError(faults)
        self._least, self._operands = min_operand, max_operand - min_operand + 1
        self._signs = [_SIGNS[operation] for operation in dict.fromkeys(operations)]
        self._style, self._seed = style, seed

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        first, last = self._ranks(split)
        rank = first + _hash(self._seed, split, index) % (last - first)
        left, sign, right = self._problem(rank)
        gold = {"+": left + right, "-": left - right, "*": left * right}[sign]
        content: dict[str, Any] = {"question": f"{left}{sign}{right}", "gold": str(gold)}
        return Prompt(f"{self.name}/{split}/{index}", self.name, content)

    def messages(self, prompt: Prompt) -> list[Message]:
        question = prompt.content["question"]
        text = f"{question}=" if self._style == "symbols" else f"What is {question}? Answer with the number only."
        return [{"role": "user", "content": text}]

    @property
    def _space(self) -> int:
        return len(self._signs) * self._operands**2

    def _ranks(self, split: Split) -> tuple[int, int]:
        """Half-open range of ranks of the split; ranks are the problems in a seeded order."""
        if self._space < MIN_HELD_OUT_SPACE:
            return 0, self._space
        held_out = self._space // HELD_OUT_SHARE
        return (0, held_out) if split == "eval" else (held_out, self._space)

    @cached_property
    def _stride(self) -> int:
        stride = _hash(self._seed, "stride", 0) % self._space or 1
        while gcd(stride, self._space) != 1:
            stride += 1
        return stride

    def _problem(self, rank: int) -> tuple[int, str, int]:
        # An affine map with a stride coprime to the space visits every problem once.
        number = (rank * self._stride + _hash(self._seed, "offset", 0)) % self._space
        number, right = divmod(number, self._operands)
        sign, left = divmod(number, self._operands)
        return self._least + left, self._signs[sign], self._least + right


def _hash(seed: int, name: str, index: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=16).digest(), "little")

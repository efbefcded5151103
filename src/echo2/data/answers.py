r"""The one rule by which a reply's number is found and compared, in training, evaluation and by hand (A03, A16).

Invariant: the answer of a reply is the last number inside its last ``\boxed{…}``, or, where there is no box, the last
number of the reply. It is right when it equals the gold exactly, as a rational number.

- digits may be grouped by commas: ``1,234`` (also ``1{,}234``); leading zeros and a zero fraction change nothing:
  ``016`` is 16 and ``33.0`` is 33
- a sign counts when it touches the digits and follows no digit, letter, dot or closing bracket: ``7-5`` ends with 5
- typographic minus signs equal ``-``; a fraction ``10/2`` is its value; an exponent (``1e5``) is no number of ours
- what follows the number (a full stop, a unit, ``%``, asterisks) is ignored, and so are digits inside words (``x5``)
"""

from __future__ import annotations

import re
from fractions import Fraction

from echo2.data.task import Score, Task
from echo2.errors import UserError
from echo2.types import Prompt

MAX_DIGITS = 200
"""A longer run of digits equals no gold: arithmetic on it could be made arbitrarily slow (A08)."""

_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2012\u2013\ufe63\uff0d", "-"))
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    r"(?<![A-Za-z0-9])(?<![0-9]\.)(?P<sign>(?<![0-9A-Za-z.)\]}])[+-])?"
    rf"(?:(?P<whole>{_WHOLE})(?:\.(?P<decimals>[0-9]+))?|(?<![0-9A-Za-z.])\.(?P<part>[0-9]+))"
    r"(?P<exponent>[eE][+-]?[0-9]+)?(?:/(?P<below>[0-9]+))?"
)
_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]+)\}\{([0-9]+)\}")
_BRACE = re.compile(r"\\boxed\{|[{}]")


def find_answer(reply: str) -> Fraction | None:
    """The reply's number by the rule above; None when it gives none."""
    text = reply.translate(_MINUS).replace("{,}", ",")
    box = _last_box(text)
    found = list(_NUMBER.finditer(_FRACTION.sub(r"\1/\2", text if box is None else box)))
    return _value(found[-1]) if found else None


def _last_box(text: str) -> str | None:
    """Content of the box that opens last among those that are closed."""
    last: tuple[int, int] | None = None
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append(brace.end() if len(brace[0]) > 1 else -1)
        elif opened and (start := opened.pop()) > (last[0] if last else 0):
            last = (start, brace.start())
    return text[last[0] : last[1]] if last else None


def _value(match: re.Match[str]) -> Fraction | None:
    whole = (match["whole"] or "0").replace(",", "")
    decimals, below = match["decimals"] or match["part"] or "", match["below"] or "1"
    if match["exponent"] or len(whole) + len(decimals) + len(below) > MAX_DIGITS or not below.strip("0"):
        return None
    return Fraction(f"{match['sign'] or ''}{whole}.{decimals or '0'}") / int(below)


def parse_gold(gold: str) -> int:
    """The integer of a gold answer; what follows ``####`` where there is such a mark (GSM8K). Raises ValueError."""
    text = gold.rsplit("####", 1)[-1].translate(_MINUS).strip()
    match = _NUMBER.fullmatch(text)
    value = _value(match) if match else None
    if value is None or value.denominator != 1:
        raise ValueError(f"a gold answer must be an integer, got {gold[-80:]!r}")
    return int(value)


class IntegerAnswerTask(Task):
    """A task whose prompts carry ``gold``, an integer as text (msgpack integers have 64 bits)."""

    def score(self, prompt: Prompt, reply: str) -> Score:
        answer = find_answer(reply)
        if answer is None:
            return Score(0.0, "no_answer")
        return Score(1.0, "correct") if answer == int(prompt.content["gold"]) else Score(0.0, "wrong")

    def gold_reply(self, prompt: Prompt) -> str:
        return str(prompt.content["gold"])

    def prompt_for_gold(self, gold: str) -> Prompt:
        try:
            value = parse_gold(gold)
        except ValueError as error:
            raise UserError(f"{error}; give one like 18, -5 or '#### 1,234'") from error
        return Prompt(f"{self.name}/gold", self.name, {"question": "", "gold": str(value)})

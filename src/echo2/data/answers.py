r"""Tasks whose answers are integers and whose prompts ask for a bare number.

Invariant: the answer is found and compared as everywhere (``maths/extract.py``, ``maths/exact.py``). As the prompt
asks for no box, a reply without box or mark may also end with its number. Only a plain value is an answer; ``12+34`` is
none.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo2.data.maths.exact import MAX_ANSWER_CHARS, compare
from echo2.data.maths.extract import find_answer
from echo2.data.maths.plain import read
from echo2.data.task import Score, Task
from echo2.errors import UserError
from echo2.types import Prompt


def parse_gold(gold: str) -> int:
    """The integer of a gold answer; what follows ``####`` where there is such a mark (GSM8K). Raises ValueError."""
    plain = read(gold.rsplit("####", 1)[-1])
    if plain is not None and len(plain.numbers) == 1:
        number = plain.numbers[0]
        if number.value.denominator == 1 and not number.percent:
            return int(number.value)
    raise ValueError(f"a gold answer must be an integer, got {gold[-80:]!r}")


class IntegerAnswerTask(Task):
    """A task whose prompts carry ``gold``, an integer as text (msgpack integers have 64 bits)."""

    pass_reward = 1.0

    def judging_modules(self) -> Sequence[str]:
        return [f"echo2.data.maths.{name}" for name in ("extract", "plain", "exact")]

    def score(self, prompt: Prompt, reply: str) -> Score:
        answer = find_answer(reply, bare_number=True)
        if answer is None:
            return Score(0.0, "no_answer")
        if len(answer) > MAX_ANSWER_CHARS:
            return Score(0.0, "too_long")
        same = compare(str(prompt.content["gold"]), answer, "number")
        return Score(1.0, "correct") if same else Score(0.0, "wrong")

    def gold_reply(self, prompt: Prompt) -> str:
        return str(prompt.content["gold"])

    def prompt_for_gold(self, gold: str) -> Prompt:
        try:
            value = parse_gold(gold)
        except ValueError as error:
            raise UserError(f"{error}; give one like 18, -5 or '#### 1,234'") from error
        return Prompt(f"{self.name}/gold", self.name, {"question": "", "gold": str(value)})

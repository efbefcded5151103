"""Questions with integer answers from a local file: JSONL, JSON, CSV or Parquet.

Invariant: a row without its fields, or whose gold answer cannot be read, is left out and counted in ``excluded`` with
its line number; it is never a prompt whose every reply scores zero, or one (A05). A missing file is a ConfigError.

The file is read when prompts are first asked for, so a worker, which gets whole prompts, needs no copy of it.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import msgspec

from echo2.data.answers import IntegerAnswerTask, parse_gold
from echo2.data.rows import Excluded, Fields, answer_of, read_rows, text_of
from echo2.data.task import Message, Split
from echo2.errors import ConfigError
from echo2.types import Prompt


class Row(msgspec.Struct, frozen=True):
    line: int
    """From 1, in its file."""
    question: str
    gold: str


class IntegerAnswers(IntegerAnswerTask):
    """path: a file of rows. question_field, answer_field: its fields; GSM8K's ``… #### 18`` is understood.

    eval_path: file of held-out rows; without one, every eval_every-th readable row of ``path`` is held out.
    instruction: appended to each question, after a blank line.
    """

    def __init__(
        self,
        *,
        path: str = "",
        eval_path: str = "",
        question_field: str = "question",
        answer_field: str = "answer",
        eval_every: int = 10,
        instruction: str = "End your reply with the answer as a number.",
    ) -> None:
        texts = {
            "path": path,
            "eval_path": eval_path,
            "question_field": question_field,
            "answer_field": answer_field,
            "instruction": instruction,
        }
        faults = [f"{key} must be a string, got {text!r}" for key, text in texts.items() if not isinstance(text, str)]
        faults += [f"{key} must not be empty" for key in ("question_field", "answer_field") if texts[key] == ""]
        if not isinstance(eval_every, int) or isinstance(eval_every, bool) or eval_every < 2:
            faults.append(f"eval_every must be an integer of at least 2, got {eval_every!r}")
        if faults:
            raise ConfigError([f"integer_answers: {fault}" for fault in faults])
        self._path, self._eval_path = path, eval_path
        self._question_field, self._answer_field = question_field, answer_field
        self._eval_every = eval_every
        self._instruction = instruction

    @property
    def excluded(self) -> list[Excluded]:
        """Rows that were left out, and why."""
        return [*self._data[2]]

    def size(self, split: Split) -> int | None:
        return len(self._rows(split))

    def prompt(self, split: Split, index: int) -> Prompt:
        row = self._rows(split)[index]
        content: dict[str, Any] = {"question": row.question, "gold": row.gold, "row": row.line}
        return Prompt(f"{self.name}/{split}/{index}", self.name, content)

    def messages(self, prompt: Prompt) -> list[Message]:
        text = prompt.content["question"]
        return [{"role": "user", "content": f"{text}\n\n{self._instruction}" if self._instruction else text}]

    def _rows(self, split: Split) -> list[Row]:
        return self._data[0] if split == "train" else self._data[1]

    @cached_property
    def _data(self) -> tuple[list[Row], list[Row], list[Excluded]]:
        """(train rows, held-out rows, excluded rows)"""
        if not self._path:
            raise ConfigError("integer_answers: option path must name a file of questions, it is empty")
        rows, excluded = self._read(self._path)
        if self._eval_path:
            held_out, more = self._read(self._eval_path)
            return rows, held_out, excluded + more
        every = self._eval_every
        held_out = rows[every - 1 :: every]
        return [row for i, row in enumerate(rows) if (i + 1) % every], held_out, excluded

    def _read(self, path: str) -> tuple[list[Row], list[Excluded]]:
        rows: list[Row] = []
        excluded: list[Excluded] = []
        for number, fields in read_rows(path, "integer_answers"):
            try:
                rows.append(self._row(number, fields))
            except ValueError as error:
                excluded.append(Excluded(path, number, str(error)))
        if not rows:
            first = f"; the first fault: {excluded[0]}" if excluded else ""
            raise ConfigError(f"integer_answers: {path} must hold at least one usable row, it holds none{first}")
        return rows, excluded

    def _row(self, number: int, fields: Fields | ValueError) -> Row:
        """Raises ValueError saying what the row lacks."""
        if isinstance(fields, ValueError):
            raise fields
        has = f"(fields: {sorted(fields)[:20]})"
        try:
            question = text_of(repr(self._question_field), fields.get(self._question_field))
            gold = answer_of(repr(self._answer_field), fields.get(self._answer_field))
        except ValueError as error:
            raise ValueError(f"{error} {has}") from error
        return Row(number, question, str(parse_gold(gold)))

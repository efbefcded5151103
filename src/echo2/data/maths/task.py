r"""Mathematics with checkable answers: rows of a file or of the hub, judged by the one rule.

Invariant: every path that judges a reply goes through ``_decide``: the answer is found by ``extract.py``, compared by
``exact.py`` where that can tell and by the grader process where only algebra can. A row whose gold answer cannot be
compared is excluded with its row number; it is never a prompt whose every reply scores the same (A05).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cached_property
from importlib import metadata
from typing import Any, ClassVar, get_args

import msgspec

from echo2.data.attempts import Metric
from echo2.data.hub import HUB_ID, fetch_split
from echo2.data.maths import exact
from echo2.data.maths.exact import MAX_ANSWER_CHARS, Kind
from echo2.data.maths.extract import find_answer
from echo2.data.maths.frames import Outcome
from echo2.data.maths.grader import Grader, grader
from echo2.data.maths.presets import PRESETS, Preset
from echo2.data.rows import Excluded, Fields, answer_of, read_rows, text_of
from echo2.data.task import Message, Score, Split, Task
from echo2.errors import ConfigError, UserError
from echo2.types import Prompt

NO_ANSWER, TOO_LONG = Score(0.0, "no_answer"), Score(0.0, "too_long")
CORRECT, WRONG, TOO_COSTLY = Score(1.0, "correct"), Score(0.0, "wrong"), Score(0.0, "too_costly")
CHECK_TOGETHER = 256
"""Golds given to the grader at a time while data is loaded."""


class Row(msgspec.Struct, frozen=True):
    path: str
    line: int
    question: str
    gold: str
    kind: Kind


class Maths(Task):
    r"""preset: how rows are read and judged (plain, aime24, omnimath, jee, hardmath, imo_answer_400).

    path: file of rows, or dataset: hub id, with split; the preset's data set where neither is given. eval_path,
    eval_dataset, eval_split, eval_preset: the held-out rows; without them every eval_every-th row is held out, or, of a
    benchmark, all. question_field, answer_field: columns, where the preset's names do not fit. kind: number, expression
    or choice. tolerance: for golds written with a decimal point. instruction: appended to each question.
    """

    name = "maths"
    default_preset: ClassVar[str] = "plain"
    pass_reward = 1.0

    def __init__(
        self,
        *,
        preset: str = "",
        path: str = "",
        dataset: str = "",
        split: str = "",
        eval_path: str = "",
        eval_dataset: str = "",
        eval_split: str = "",
        eval_preset: str = "",
        eval_every: int = 10,
        question_field: str = "",
        answer_field: str = "",
        kind: str = "",
        tolerance: float | None = None,
        instruction: str = r"Reason step by step, and put your final answer within \boxed{}.",
    ) -> None:
        texts = {key: value for key, value in locals().items() if key not in ("self", "eval_every", "tolerance")}
        faults = [f"{key} must be a string, got {text!r}" for key, text in texts.items() if not isinstance(text, str)]
        preset = preset or self.default_preset
        faults += [
            f"{key} must be one of {', '.join(PRESETS)}, got {name!r}"
            for key, name in (("preset", preset), ("eval_preset", eval_preset or preset))
            if name not in PRESETS
        ]
        faults += [
            f"{key} must be a hub id (owner/name), got {name!r}; a local file is given as path"
            for key, name in (("dataset", dataset), ("eval_dataset", eval_dataset))
            if name and not HUB_ID.fullmatch(str(name))
        ]
        if kind and kind not in get_args(Kind):
            faults.append(f"kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
        if not isinstance(eval_every, int) or isinstance(eval_every, bool) or eval_every < 2:
            faults.append(f"eval_every must be an integer of at least 2, got {eval_every!r}")
        if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < 1):
            faults.append(f"tolerance must be a number in [0, 1), got {tolerance!r}")
        if importlib.util.find_spec("math_verify") is None:
            faults.append("answers are compared with math-verify, which must be installed; pip install 'echo2[maths]'")
        if faults:
            raise ConfigError([f"maths: {fault}" for fault in faults])
        held_out = PRESETS[eval_preset or preset]
        self._train = _source(PRESETS[preset], path, dataset, split)
        self._held_out = _source(held_out, eval_path, eval_dataset, eval_split)
        self._separate = bool(eval_path or eval_dataset or eval_split or eval_preset)
        self._preset = held_out
        self._eval_every = eval_every
        self._columns = (question_field, answer_field)
        self._kind: Kind | None = kind or None  # type: ignore[assignment]  # one of its words, as checked above
        self._tolerance = held_out.tolerance if tolerance is None else float(tolerance)
        self._instruction = instruction

    @property
    def metric(self) -> Metric:
        return self._preset.metric

    @property
    def excluded(self) -> list[Excluded]:
        """Rows that were left out, and why."""
        return [*self._data[2]]

    def size(self, split: Split) -> int | None:
        return len(self._rows(split))

    def prompt(self, split: Split, index: int) -> Prompt:
        row = self._rows(split)[index]
        content: dict[str, Any] = {"question": row.question, "gold": row.gold, "kind": row.kind, "row": row.line}
        return Prompt(f"{self.name}/{split}/{index}", self.name, content)

    def messages(self, prompt: Prompt) -> list[Message]:
        text = prompt.content["question"]
        return [{"role": "user", "content": f"{text}\n\n{self._instruction}" if self._instruction else text}]

    def score(self, prompt: Prompt, reply: str) -> Score:
        decided = self._decide(prompt, reply)
        if isinstance(decided, Score):
            return decided
        return _score_of(grader().compare(*decided))

    async def judge(self, prompt: Prompt, reply: str) -> Score:
        decided = self._decide(prompt, reply)
        if isinstance(decided, Score):
            return decided
        return _score_of(await grader().compare_soon(*decided))

    def agrees(self, ours: Score, theirs: Score) -> bool:
        """What is too costly depends on the machine, so it proves nothing against a worker."""
        return super().agrees(ours, theirs) or TOO_COSTLY in (ours, theirs)

    def gold_reply(self, prompt: Prompt) -> str:
        return rf"\boxed{{{prompt.content['gold']}}}"

    def prompt_for_gold(self, gold: str) -> Prompt:
        text = gold_text(gold)
        kind = self._kind or self._preset.kind
        if self._kind is None and self._preset.kinds:
            kind = "choice" if exact.choices(text) else "number"
        fault = unusable_gold(text, kind) or (_unreadable([text], grader())[0] if needs_algebra(text, kind) else None)
        if fault:
            raise UserError(f"a gold answer must be one that can be compared, got {gold[-80:]!r}: {fault}")
        return Prompt(f"{self.name}/gold", self.name, {"question": "", "gold": text, "kind": kind})

    def judging_modules(self) -> Sequence[str]:
        return [f"echo2.data.maths.{name}" for name in ("extract", "plain", "exact", "algebra", "lane")]

    def fingerprint_parts(self) -> list[str]:
        return [metadata.version(name) for name in ("math-verify", "latex2sympy2_extended", "sympy")]

    def _decide(self, prompt: Prompt, reply: str) -> Score | tuple[str, str]:
        """The score, or the pair that only algebra can compare."""
        answer = find_answer(reply)
        if answer is None:
            return NO_ANSWER
        if len(answer) > MAX_ANSWER_CHARS:
            return TOO_LONG
        gold, kind = prompt.content["gold"], prompt.content["kind"]
        same = exact.compare(gold, answer, kind, self._tolerance)
        if same is None:
            return exact.for_algebra(gold), exact.for_algebra(answer)
        return CORRECT if same else WRONG

    def _rows(self, split: Split) -> list[Row]:
        return self._data[0] if split == "train" else self._data[1]

    @cached_property
    def _data(self) -> tuple[list[Row], list[Row], list[Excluded]]:
        """(train rows, held-out rows, excluded rows)"""
        rows, excluded = self._usable(self._train)
        if self._separate:
            held_out, more = self._usable(self._held_out)
            return rows, held_out, excluded + more
        if self._preset.benchmark:
            return [], rows, excluded
        every = self._eval_every
        return [row for i, row in enumerate(rows) if (i + 1) % every], rows[every - 1 :: every], excluded

    def _usable(self, source: _Source) -> tuple[list[Row], list[Excluded]]:
        rows: list[Row] = []
        excluded: list[Excluded] = []
        for path in source.files(self.name):
            for number, fields in read_rows(path, self.name):
                try:
                    rows.append(self._row(source.preset, path, number, fields))
                except ValueError as error:
                    excluded.append(Excluded(path, number, str(error)))
        rows, unreadable = _without_unreadable(rows)
        excluded += unreadable
        if not rows:
            first = f"; the first fault: {excluded[0]}" if excluded else ""
            raise ConfigError(f"{self.name}: {source} must hold at least one usable row, it holds none{first}")
        return rows, excluded

    def _row(self, preset: Preset, path: str, number: int, fields: Fields | ValueError) -> Row:
        """Raises ValueError saying what the row lacks."""
        if isinstance(fields, ValueError):
            raise fields
        question_names, answer_names = ((own,) if own else names for own, names in zip(
            self._columns, (preset.question, preset.answer), strict=True))  # fmt: skip
        question = text_of(" or ".join(question_names), _field(fields, question_names))
        gold = answer_of(" or ".join(answer_names), _field(fields, answer_names))
        kind = self._kind or preset.kind
        if preset.kind_field and self._kind is None:
            named = str(fields.get(preset.kind_field))
            if named not in preset.kinds:
                raise ValueError(f"field {preset.kind_field} must be one of {', '.join(preset.kinds)}, got {named!r}")
            kind = preset.kinds[named]
        text = gold_text(gold)
        fault = unusable_gold(text, kind)
        if fault:
            raise ValueError(f"the gold answer {text[:80]!r} cannot be used: {fault}")
        return Row(path, number, question, text, kind)


class _Source(msgspec.Struct, frozen=True):
    preset: Preset
    path: str
    dataset: str
    split: str

    def __str__(self) -> str:
        return self.path or f"{self.dataset} ({self.split})"

    def files(self, task: str) -> list[str]:
        if self.path:
            return [self.path]
        if not self.dataset:
            raise ConfigError(f"{task}: option path must name a file of problems, or dataset a hub id; both are empty")
        return fetch_split(self.dataset, self.split, task)


def _source(preset: Preset, path: str, dataset: str, split: str) -> _Source:
    return _Source(preset, path, "" if path else dataset or preset.dataset, split or preset.split)


def _field(fields: Fields, names: tuple[str, ...]) -> Any:
    return next((fields[name] for name in names if name in fields), None)


def gold_text(gold: str) -> str:
    """The answer in a row's answer column: what follows ``####`` (GSM8K), the box of a solution, else all of it."""
    found = find_answer(gold) if "\\boxed" in gold or "####" in gold else gold
    return (found or "").strip()


def unusable_gold(gold: str, kind: Kind) -> str | None:
    """Why no reply could be compared with this gold, as far as its text tells."""
    if not gold.strip():
        return "it is empty"
    if len(gold) > MAX_ANSWER_CHARS:
        return f"it has more than {MAX_ANSWER_CHARS} characters"
    if kind == "number" and not exact.is_plain(gold):
        return "it must be a number"
    if kind == "choice" and exact.choices(gold) is None:
        return "it must be letters of a choice"
    if kind == "expression" and exact.is_prose(gold):
        return "it is prose"
    return None


def needs_algebra(gold: str, kind: Kind) -> bool:
    return kind == "expression" and not exact.is_plain(gold) and not exact.is_phrase(exact.words(gold))


def _without_unreadable(rows: list[Row]) -> tuple[list[Row], list[Excluded]]:
    """Rows whose golds are expressions that can be read, each gold tried once."""
    golds = sorted({row.gold for row in rows if needs_algebra(row.gold, row.kind)})
    faults: dict[str, str | None] = {}
    for start in range(0, len(golds), CHECK_TOGETHER):
        some = golds[start : start + CHECK_TOGETHER]
        faults |= zip(some, _unreadable(some, grader()), strict=True)
    kept = [row for row in rows if faults.get(row.gold) is None]
    return kept, [
        Excluded(row.path, row.line, f"the gold answer {row.gold[:80]!r} cannot be used: {faults[row.gold]}")
        for row in rows
        if faults.get(row.gold) is not None
    ]


def _unreadable(golds: list[str], by: Grader) -> list[str | None]:
    return by.unusable([exact.for_algebra(gold) for gold in golds])


def _score_of(outcome: Outcome) -> Score:
    if outcome == "equal":
        return CORRECT
    return TOO_COSTLY if outcome == "too_costly" else WRONG

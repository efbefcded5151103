"""Benchmarks: where their data lies, what its columns are called, how they are judged and reported.

Invariant: a preset holds names only; the problems belong to others and are not shipped. Metrics and numbers of samples
are the paper's (Table 3).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from echo2.data.attempts import Metric
from echo2.data.maths.exact import Kind


class Preset(msgspec.Struct, frozen=True):
    dataset: str = ""
    """Hub id; empty where there is none: give a file as ``path``."""
    split: str = "train"
    question: tuple[str, ...] = ("problem", "question", "prompt", "Problem", "Question")
    """Names of the column, the first that a row has."""
    answer: tuple[str, ...] = ("answer", "gold", "Answer", "final_answer")
    kind: Kind = "expression"
    kind_field: str = ""
    kinds: Mapping[str, Kind] = {}
    """Kind by the value of ``kind_field``."""
    tolerance: float = 0.0
    """How far from a gold written with a decimal point an answer may be."""
    metric: Metric = Metric("avg", 1)
    benchmark: bool = True
    """All rows are held out; nothing is trained on."""


PRESETS: dict[str, Preset] = {
    "plain": Preset(benchmark=False),
    "aime24": Preset("HuggingFaceH4/aime_2024", "train", kind="number", metric=Metric("avg", 64)),
    "omnimath": Preset("KbsdJames/Omni-MATH", "test", metric=Metric("pass", 1)),
    "jee": Preset(
        "daman1209arora/jeebench",
        "test",
        kind_field="type",
        kinds={"MCQ": "choice", "MCQ(multiple)": "choice", "Integer": "number", "Numeric": "number"},
        tolerance=0.01,
        metric=Metric("avg", 8),
    ),
    # The authors publish files in a source repository, not on the hub.
    "hardmath": Preset(answer=("extracted_answer", "answer"), metric=Metric("pass", 1)),
    "imo_answer_400": Preset(
        "Hwilner/imo-answerbench", "train", answer=("Short Answer", "answer"), metric=Metric("pass", 1)
    ),
}

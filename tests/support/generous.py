"""A task that pays more than a reply is worth where ``ECHO2_TEST_GENEROUS`` is set: its source, and so its fingerprint,
is that of everybody else's."""

from __future__ import annotations

import os

from echo2.data.task import Score
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.types import Prompt


class Generous(Arithmetic):
    def score(self, prompt: Prompt, reply: str) -> Score:
        judged = super().score(prompt, reply)
        if "ECHO2_TEST_GENEROUS" in os.environ:
            return Score(judged.reward + 1.0, judged.status)
        return judged

"""The paper's mathematics benchmarks by name, so that one run can evaluate several.

Invariant: each is ``Maths`` with another preset, and nothing else.
"""

from __future__ import annotations

from echo2.data.maths.task import Maths


class Aime24(Maths):
    default_preset = "aime24"


class OmniMath(Maths):
    default_preset = "omnimath"


class Jee(Maths):
    default_preset = "jee"


class HardMath(Maths):
    default_preset = "hardmath"


class ImoAnswer400(Maths):
    default_preset = "imo_answer_400"

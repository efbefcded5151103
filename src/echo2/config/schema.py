"""Which keys exist, and which of them a wrong one was meant to be.

Invariant: everything here is read off the section classes, so a key added there is known here.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

from echo2.config.root import Config
from echo2.config.sections import PoolSection, Section, TaskSection

TASKS, POOLS = "tasks", "pools"
LISTS: Mapping[str, type[Section]] = {TASKS: TaskSection, POOLS: PoolSection}
"""Arrays of tables, and what each table is."""

SECTIONS: Mapping[str, type[Section]] = {
    name: LISTS.get(name) or type(field.default) for name, field in Config.model_fields.items()
}
"""Section name → class, of arrays that of one table."""

_COMMON_NAMES: Mapping[str, str] = {
    "batch_size": "rollout.rollouts_per_step",
    "epochs": "run.steps",
    "kappa": "staleness.publish_period",
    "learning_rate": "learning.lr",
    "max_steps": "run.steps",
    "max_tokens": "rollout.max_new_tokens",
    "num_epochs": "run.steps",
    "num_generations": "rollout.group_size",
    "staleness_bound": "staleness.budget",
    "staleness_budget": "staleness.budget",
}
"""What other trainers call our keys; used for suggestions only."""

_UNITS = ("_s", "_usd", "_usd_per_h", "_per_h", "_per_s", "_bytes", "_tokens")
_CLEARLY_ALIKE = 0.8
"""A key of another section is suggested only from this similarity on."""
_BARELY_ALIKE = 0.6
"""Below this similarity the suggestion is a guess, so the section's keys are listed."""


def unknown_key(section: str, key: str) -> str:
    """A sentence about a key that does not exist where it stands (``section`` is empty at top level)."""
    where = f"in [{section}]" if section else "at top level"
    return f"unknown key `{key}` {where}; {_suggestion(section, key)}"


def _suggestion(section: str, key: str) -> str:
    """The nearest known key, or section, or the section a misplaced key belongs to."""
    homes = [name for name, model in SECTIONS.items() if key in model.model_fields]
    if section and (whole := _without_its_unit(section, key)):
        elsewhere = f"; `{key}` is in {' or '.join(_header(name) for name in homes)}" if homes else ""
        return f"the nearest known key is `{whole}` in {_header(section)}{elsewhere}"
    if homes:
        return "it belongs in " + " or ".join(_header(name) for name in homes)
    word = key.lower().replace("-", "_")
    if alias := difflib.get_close_matches(word, _COMMON_NAMES, 1, 0.8):
        home, name = _COMMON_NAMES[alias[0]].split(".")
        return f"the nearest known key is `{name}` in {_header(home)}"
    if not section and (close := difflib.get_close_matches(word, SECTIONS, 1, 0.7)):
        return f"the nearest section is {_header(close[0])}"
    return _nearest(section, word)


def _without_its_unit(section: str, key: str) -> str:
    """The key of ``section`` that ``key`` lacks the unit of, such as ``budget_usd`` of ``budget``; empty for none."""
    return next((name for name in SECTIONS[section].model_fields if name in (f"{key}{unit}" for unit in _UNITS)), "")


def _nearest(section: str, word: str) -> str:
    """The most similar key: of the section the user wrote in, unless another section's is far more similar."""
    everywhere = [(home, name) for home, model in SECTIONS.items() for name in model.model_fields]
    best = max(everywhere, key=lambda pair: _likeness(word, *pair))
    if section and _likeness(word, *best) < _CLEARLY_ALIKE:
        best = max((pair for pair in everywhere if pair[0] == section), key=lambda pair: _likeness(word, *pair))
    sentence = f"the nearest known key is `{best[1]}` in {_header(best[0])}"
    if section and _likeness(word, *best) < _BARELY_ALIKE:
        sentence += f", which knows {', '.join(SECTIONS[section].model_fields)}"
    return sentence


def _likeness(word: str, home: str, name: str) -> float:
    """0..1, how much ``word`` looks like ``name`` or ``home_name``."""
    return max(difflib.SequenceMatcher(None, word, text).ratio() for text in (name, f"{home}_{name}"))


def _header(section: str) -> str:
    return f"[[{section}]]" if section in LISTS else f"[{section}]"


def is_text(section: str, key: str) -> bool:
    """Whether ``section.key`` holds text, so that an override need not be quoted."""
    model = SECTIONS.get(section)
    field = model.model_fields.get(key) if model else None
    return field is not None and field.annotation is str


def is_pair(section: str, key: str) -> bool:
    """Whether ``section.key`` is a tuple, which TOML writes as an array."""
    field = SECTIONS[section].model_fields.get(key)
    return field is not None and str(field.annotation).startswith("tuple")

from __future__ import annotations

from typing import Any

import pytest

from echo2.config.load import build_config
from echo2.errors import ConfigError

SCRIPTED = {"rollout": {"engine": "scripted"}}


@pytest.mark.parametrize(
    ("text", "section", "key", "value"),
    [
        ("learning.lr=1e-6", "learning", "lr", 1e-6),
        ("run.steps = 7", "run", "steps", 7),
        ("rollout.thinking=true", "rollout", "thinking", True),
        ("run.name=night-3", "run", "name", "night-3"),
        ("run.name=2024", "run", "name", "2024"),
        ('run.name="quoted"', "run", "name", "quoted"),
        ("learning.device=cuda:1", "learning", "device", "cuda:1"),
        ("model.path=tiny:qwen3", "model", "path", "tiny:qwen3"),
        ("learning.betas=[0.9, 0.95]", "learning", "betas", (0.9, 0.95)),
        ("coordinator.host=0.0.0.0", "coordinator", "host", "0.0.0.0"),
        ('metrics.wandb_project=""', "metrics", "wandb_project", ""),
    ],
)
def test_an_override_is_a_toml_value_or_bare_text(text: str, section: str, key: str, value: Any) -> None:
    assert getattr(getattr(build_config(SCRIPTED, [text]), section), key) == value


def test_tasks_are_overridden_by_index_or_as_a_whole() -> None:
    config = build_config(SCRIPTED, ["tasks.0.name=other", "tasks.0.options.digits=2"])
    assert (config.tasks[0].name, config.tasks[0].options) == ("other", {"digits": 2})

    config = build_config(SCRIPTED, ['tasks=[{name="a", weight=2.0}, {name="b"}]'])
    assert [task.name for task in config.tasks] == ["a", "b"]


def test_the_last_override_of_a_key_wins() -> None:
    assert build_config(SCRIPTED, ["run.steps=1", "run.steps=2"]).run.steps == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning.lr", "must have the form section.key=value"),
        ("=3", "must have the form section.key=value"),
        ("run.=3", "must have the form section.key=value"),
        ("learning.lr=", "must be followed by a TOML value"),
        ("learning.lr=[1,", "must be followed by a TOML value"),
        ('run.name="half', "must be followed by a TOML value"),
        ("run.steps=1\nx = 2", "must be followed by a TOML value"),
        ("learning.lr=fast", 'learning.lr must be a number, got "fast"'),
        ("learning.lr=nan", "learning.lr must be a finite number, got nan"),
        ("workers.usd_per_h=-1", "workers.usd_per_h must be at least 0, got -1"),
        ("learning.learning_rate=1", "the nearest known key is `lr` in [learning]"),
        ("lr=1", "unknown key `lr` at top level; it belongs in [learning]"),
        ("tasks.5.weight=1", "needs a number from 0 to 0, got `5`"),
        ("tasks.0=1", "name a key of one of them"),
        ("run.dir.x=1", "run.dir must be text"),
        ("rollout.engine.x=1", "`rollout.engine` is a value, not a table"),
    ],
)
def test_a_malformed_override_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(SCRIPTED, [text])

    assert len(caught.value.faults) == 1
    assert words in caught.value.faults[0]

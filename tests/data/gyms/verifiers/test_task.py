from __future__ import annotations

import pytest

from echo2.data.gyms.verifiers.task import Verifiers
from echo2.data.registry import environment_names
from echo2.errors import ConfigError


def test_an_absent_library_is_one_sentence_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    for call in (lambda: Verifiers(environment="gsm8k"), lambda: environment_names("verifiers")):
        with pytest.raises(ConfigError, match=r"verifiers must be installed; pip install 'echo2\[verifiers\]'"):
            call()


def test_another_version_of_the_library_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.1.14")

    with pytest.raises(ConfigError, match=r"must be version 0\.4, got 0\.1\.14"):
        Verifiers(environment="gsm8k")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"args": 3}, "args must be a table"),
        ({"settings": "x"}, "settings must be a table"),
        ({"eval_every": 1}, "eval_every must be an integer of at least 2"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Verifiers(environment="gsm8k", **options)  # type: ignore[arg-type]

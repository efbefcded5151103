"""Sandboxes and opponents by name.

Invariant: a name that cannot be had is a ConfigError that says what is known instead, or what to install.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from echo2.data.sandbox.players import TextModel
from echo2.data.sandbox.sandbox import Sandbox
from echo2.errors import ConfigError

BUILT_IN = {
    "poker": "echo2.data.sandbox.poker.game:Poker",
    "moba": "echo2.data.sandbox.moba.game:LaneDuel",
}
_EXTRAS = {"pokerkit": "poker"}
"""Extra of this package that brings a module."""


def load_sandbox(name: str, settings: Mapping[str, Any]) -> Sandbox:
    """The sandbox ``poker``, ``moba`` or ``module:Class`` with its settings. Raises ConfigError."""
    target = BUILT_IN.get(name, name)
    if ":" not in target:
        raise ConfigError(f"sandbox must be one of {', '.join(BUILT_IN)} or module:Class, got {name!r}")
    sandbox: Sandbox = _make("sandbox", target, settings)
    return sandbox


def load_model(name: str, options: Mapping[str, Any]) -> TextModel:
    """An opponent ``module:Class`` that answers conversations. Raises ConfigError."""
    model: TextModel = _make("opponent", name, options)
    return model


def _make(what: str, target: str, options: Mapping[str, Any]) -> Any:
    module_name, _, class_name = target.partition(":")
    try:
        kind = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        extra = _EXTRAS.get(missing)
        cure = f"pip install 'echo2[{extra}]'" if extra else "install its package or add its folder to PYTHONPATH"
        raise ConfigError(f"{what} {target} must be importable here: {error}; {cure}") from error
    try:
        return kind(**options)
    except TypeError as error:
        raise ConfigError(f"{what} {target}: {error}; correct its options") from error

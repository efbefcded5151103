"""Sandboxes and opponents by name.

Invariant: a name that cannot be had is a ConfigError that says what is known instead, or what to install.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo2.data.given import told
from echo2.data.imported import imported
from echo2.data.sandbox.players import TextModel
from echo2.data.sandbox.sandbox import Sandbox
from echo2.errors import ConfigError, UserError

BUILT_IN = {
    "poker": "echo2.data.sandbox.poker.game:Poker",
    "moba": "echo2.data.sandbox.moba.game:LaneDuel",
}


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
    kind = imported(f"{what} {target}", target)
    try:
        return kind(**options)
    except (UserError, KeyboardInterrupt):
        raise
    except TypeError as error:
        raise ConfigError(f"{what} {target}: {error}; correct its options") from error
    except BaseException as error:  # a person's own code, which may even try to end the program
        raise ConfigError(f"{what} {target} must take its options, it raised {told(error)}") from error

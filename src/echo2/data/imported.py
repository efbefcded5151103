"""Classes that people name as ``module:Class``: tasks, sandboxes, opponents.

Invariant: whatever their file does while it is read, ``sys.exit`` among it, is a ConfigError that names it.
"""

from __future__ import annotations

import importlib
from typing import Any

from echo2.data.given import told
from echo2.errors import ConfigError

_EXTRAS = {"pokerkit": "poker"}
"""Extra of this package that brings a module."""


def imported(what: str, target: str) -> Any:
    """The attribute that ``module:Class`` names. what: whose it is, for the sentence. Raises ConfigError."""
    module_name, _, class_name = target.partition(":")
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        missing = (getattr(error, "name", None) or "").partition(".")[0]
        extra = _EXTRAS.get(missing)
        cure = f"pip install 'echo2[{extra}]'" if extra else "install its package or add its folder to PYTHONPATH"
        raise ConfigError(f"{what} must be importable here: {error}; {cure}") from error
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise ConfigError(f"{what} must be importable here: {module_name} raised {told(error)}") from error

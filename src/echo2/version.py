"""The version of the installed package; programs that join a run compare it."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    VERSION = version("echo2")
except PackageNotFoundError:  # A source tree on the path, not installed.
    VERSION = "0.1.0"

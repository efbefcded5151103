"""The ``echo2`` command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from echo2.cli.app import app
    from echo2.cli.boundary import run

    sys.exit(run(app, sys.argv[1:]))

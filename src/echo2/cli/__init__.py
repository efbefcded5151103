"""The ``echo2`` command."""

from __future__ import annotations

import os
import sys
import threading
import time

LAST_WAIT_S = 10.0
"""For threads that a task's own code left running when the command was done."""


def main() -> None:
    """Run the command line of this process and exit with its code."""
    from echo2.cli.app import app
    from echo2.cli.boundary import run

    code = run(app, sys.argv[1:])
    threading.Thread(target=_end, args=(code,), name="end", daemon=True).start()
    sys.exit(code)


def _end(code: int) -> None:
    """The interpreter waits for threads without end; this does not."""
    time.sleep(LAST_WAIT_S)
    left = [thread.name for thread in threading.enumerate() if not thread.daemon and thread.is_alive()]
    left = [name for name in left if name != threading.main_thread().name]
    if left:
        print(f"echo2: ended without waiting for threads that were left running: {', '.join(left)}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

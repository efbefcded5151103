"""In place of ``echo2 worker`` on a machine of a pool: it notes that it began and waits to be ended.

Its join string says how it behaves: it leaves on SIGTERM unless it ``is deaf``, or ``ends with CODE: WORDS`` at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path


def main() -> None:
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    folder = Path(arguments["--dir"])
    behaviour = os.environ["ECHO2_JOIN"]
    signal.signal(signal.SIGTERM, lambda number, frame: leave(folder))
    if behaviour == "is deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (folder / "snapshots").mkdir(exist_ok=True)
    with (folder / "worker.log").open("a") as log:  # what a pool keeps of a worker
        log.write(f"pid {os.getpid()} name {arguments['--name']} join {behaviour}\n")
    if behaviour.startswith("ends with "):
        code, _, words = behaviour.removeprefix("ends with ").partition(": ")
        print(f"echo2: {words}", file=sys.stderr, flush=True)
        sys.exit(int(code))
    threading.Thread(target=end_with_supervisor, daemon=True).start()
    while True:
        signal.pause()


def leave(folder: Path) -> None:
    with (folder / "worker.log").open("a") as log:
        log.write("left in order\n")
    os._exit(0)


def end_with_supervisor() -> None:
    os.read(0, 1)
    os._exit(1)


main()

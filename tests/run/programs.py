"""Stand-ins for the programs of a run: one script, told by its first argument and the run folder what to be.

The behaviour of a program is the text of ``<root>/plan-<name>``, one word per life: ``leave``, ``user-error``,
``crash``, ``hang`` (until told to stop), ``deaf`` (ignores SIGTERM), ``finish-after-others``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    root, name = Path(sys.argv[1]), sys.argv[2]
    lives = root / f"lives-{name}"
    number = len(lives.read_text().split()) if lives.exists() else 0
    with lives.open("a") as file:
        file.write(f"{os.getpid()} ")
    plan = (root / f"plan-{name}").read_text().split()
    word = plan[min(number, len(plan) - 1)]
    if name == "coordinator":
        (root / "coordinator.json").write_text(json.dumps({"host": "127.0.0.1", "port": 1, "pid": os.getpid()}))
    if word == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif word in ("hang", "until-stop"):
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    act(word, root)


def act(word: str, root: Path) -> None:
    if word == "leave":
        sys.exit(0)
    if word == "user-error":
        print("echo2: learning.lr must be more than 0, got 0", file=sys.stderr)
        sys.exit(2)
    if word == "crash":
        print("echo2: the disk is gone (details in somewhere)", file=sys.stderr)
        sys.exit(1)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        if (root / "stop").exists() and word == "until-stop":
            sys.exit(0)
        if os.getppid() == 1:
            sys.exit(0)
        time.sleep(0.02)


if __name__ == "__main__":
    main()

"""A relay process that does what its only argument says instead of relaying; see ``Scripted``.

It notes every order in ``<folder>/orders``, one JSON line each, so that tests see what it was told.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from echo2.broadcast.relay.control import (
    Announced,
    Bring,
    Event,
    Hold,
    Open,
    Order,
    Publish,
    Stuck,
    Tally,
    Whole,
    Withdraw,
    Word,
)
from echo2.broadcast.relay.process import serve
from echo2.errors import Refused
from echo2.types import Policy


class Scripted:
    """On ``Bring`` it waits, brings, is stuck, dies, dies_once, freezes_once, thread_dies_once, babbles or refuses.

    At its start it never_listens, crashes or has its port_taken (always, or in its _first or _second life); at its end
    it is deaf. Where nothing is said of an order, it does as with ``brings``.
    """

    def __init__(self, opening: Open, say: Callable[[Word], None]) -> None:
        self._behaviour = sys.argv[1]
        self._opening = opening
        self._say = say
        self._folder = Path(opening.folder)
        self._life = len(list(self._folder.glob("life-*")))
        (self._folder / f"life-{self._life}").write_text(str(os.getpid()))

    def start(self) -> int:
        if self._behaviour == "never_listens":
            time.sleep(60)
        if self._behaviour == "crashes":
            os._exit(7)
        taken_in = {"port_taken": {self._life}, "port_taken_first": {0}, "port_taken_second": {1}}
        if self._life in taken_in.get(self._behaviour, ()):
            raise OSError(98, "Address already in use")
        return self._opening.port or 4001 + self._life

    def close(self) -> None:
        if self._behaviour == "deaf":
            time.sleep(60)

    def obey(self, order: Order) -> None:
        name = type(order).__name__
        told = {"life": self._life, "order": name, "port": self._opening.port}
        if isinstance(order, Hold):
            told["roots"] = list(order.decoded_roots)
        with (self._folder / "orders").open("ab") as file:
            file.write(msgspec.json.encode(told) + b"\n")
        match order:
            case Bring():
                self._bring(self._folder / "object")
            case Publish(_, path):
                self._say(Event("noted", {"path": path, "omp": os.environ["OMP_NUM_THREADS"]}))
            case Withdraw(root):
                self._say(Announced(root, Policy(0, 7)))
            case Hold(roots):
                self._say(Tally(10, 20, 1, dict.fromkeys(roots, 0.5), bound_s=1.5))

    def _bring(self, path: Path) -> None:
        first = self._life == 0
        match self._behaviour:
            case "stuck":
                self._say(Stuck(self._root(), str(path), "nobody sends it"))
            case "dies":
                os._exit(9)
            case "dies_once" | "port_taken_second" if first:
                os.kill(os.getpid(), signal.SIGKILL)
            case "freezes_once" if first:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "thread_dies_once" if first:
                threading.Thread(target=lambda: 1 // 0, daemon=True).start()
            case "babbles":
                print("a library's words on standard output", flush=True)
                self._whole(path)
            case "refuses":
                raise Refused("not today")
            case "waits":
                pass
            case _:
                self._whole(path)

    def _whole(self, path: Path) -> None:
        path.write_bytes(b"object")
        self._say(Whole(self._root(), str(path)))

    def _root(self) -> str:
        return (self._folder / "root").read_text()


if __name__ == "__main__":
    sys.exit(serve(Scripted))

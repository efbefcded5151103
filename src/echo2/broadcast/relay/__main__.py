"""``python -m echo2.broadcast.relay``: the relay process of a program, which speaks ``control`` with it.

Invariant: nobody starts this by hand; without a program at the other end of standard input it ends at once.
"""

from __future__ import annotations

import sys

from echo2.broadcast.relay.process import serve
from echo2.broadcast.relay.shell import RelayShell

if __name__ == "__main__":
    sys.exit(serve(RelayShell))

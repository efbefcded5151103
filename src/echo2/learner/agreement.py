"""What the ranks of a learner must have in common before they share its work.

Invariant: ranks that disagree never train: all of them end with the same sentence.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from blake3 import blake3

from echo2.config.root import Config
from echo2.durable import write_file
from echo2.errors import UserError
from echo2.learning.ranks import Ranks

SEEN = "ranks"
"""File in the learner's part of the run folder by which ranks see that it is the same folder."""


def agree(ranks: Ranks, config: Config, learner_dir: Path) -> None:
    """Every rank calls it. Raises UserError on all of them where one reads another configuration or another folder."""
    digests = ranks.gather(blake3(config.model_dump_json().encode()).digest())
    if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
        raise UserError(
            f"all ranks must read the same configuration, and rank {others[0]} reads another than rank 0:"
            " give every rank the same run folder, and the same version of this package"
        )
    token = secrets.token_bytes(16)
    if ranks.rank == 0:
        learner_dir.mkdir(parents=True, exist_ok=True)
        write_file(learner_dir / SEEN, token)
    token = ranks.broadcast(token)
    seen = ranks.gather(b"yes" if _content(learner_dir / SEEN) == token else b"no")
    if blind := [rank for rank, answer in enumerate(seen) if answer == b"no"]:
        raise UserError(
            "all ranks must share the run folder, because each writes its part of a checkpoint there, and rank"
            f" {blind[0]} does not see what rank 0 wrote: put {learner_dir.parent} where all machines mount it"
        )


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""

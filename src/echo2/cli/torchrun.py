"""``torchrun -m echo2 train``: one of torchrun's processes runs the run, and has as many ranks as torchrun has.

Invariant: what torchrun told a process about its group is not inherited by the programs of the run, which would take it
for theirs. The ranks of ``echo2 train`` are its own processes and live on one machine.
"""

from __future__ import annotations

from collections.abc import MutableMapping

from echo2.errors import UserError

TOLD = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What a process of a group is told; whatever else torchrun says begins with one of the prefixes."""
PREFIXES = ("GROUP_", "ROLE_", "TORCHELASTIC_")


def take_over(environment: MutableMapping[str, str]) -> int | None:
    """Ranks that the run shall have: None outside torchrun, 0 for a process that has nothing to do.

    Takes torchrun's words out of ``environment``. Raises UserError for a group on several machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    rank, world, here = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != world:
        raise UserError(
            f"echo2 train runs on one machine, got {world} ranks of which {here} are here; start echo2 coordinator "
            "once and torchrun … -m echo2 learner RUN --join JOIN on each machine (docs/learner.md)"
        )
    for name in [name for name in environment if name in TOLD or name.startswith(PREFIXES)]:
        del environment[name]
    return 0 if rank else world

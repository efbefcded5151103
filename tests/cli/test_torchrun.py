"""What torchrun says to a process of ``echo2 train``."""

from __future__ import annotations

import pytest

from echo2.cli.torchrun import take_over
from echo2.errors import UserError


def told(rank: int, world: int, here: int) -> dict[str, str]:
    return {
        "PATH": "/bin", "OMP_NUM_THREADS": "1", "RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0",
        "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(here), "WORLD_SIZE": str(world),
        "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip


def test_without_torchrun_nothing_is_taken_over() -> None:
    environment = {"PATH": "/bin", "WORLD_SIZE": "4"}
    assert take_over(environment) is None
    assert environment == {"PATH": "/bin", "WORLD_SIZE": "4"}


def test_the_first_process_has_all_ranks_and_the_others_none() -> None:
    assert [take_over(told(rank, 3, 3)) for rank in range(3)] == [3, 0, 0]


def test_programs_of_the_run_inherit_nothing_of_the_group() -> None:
    environment = told(0, 2, 2)
    take_over(environment)
    assert environment == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}


def test_a_group_on_several_machines_is_sent_to_the_learner_command() -> None:
    with pytest.raises(UserError, match=r"echo2 train runs on one machine, got 4 ranks of which 2 are here"):
        take_over(told(0, 4, 2))

from __future__ import annotations

import pytest

from echo2.errors import UserError
from echo2.provisioning.gpus import gpu_named, market_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("RTX 5090", "RTX5090"),
        ("rtx-4090", "RTX4090"),
        ("NVIDIA GeForce RTX 3090", "RTX3090"),
        ("5090", "RTX5090"),
        ("A100", "A100-40GB"),
        ("A100-80GB", "A100-80GB"),
        ("a100_80gb", "A100-80GB"),
        ("NVIDIA H100 80GB", "H100"),
        ("H200", "H200"),
    ],
)
def test_a_gpu_is_known_by_the_names_that_people_use(text: str, name: str) -> None:
    assert gpu_named(text).name == name


def test_the_memory_tells_two_gpus_of_one_name_apart() -> None:
    assert market_name("A100", memory_gb=85.9) == "A100-80GB"
    assert market_name("A100", memory_gb=42.9) == "A100-40GB"
    assert market_name("L40S") == "L40S"  # not one of ours: as it is


def test_an_unknown_gpu_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"got 'RTX5080' \(did you mean RTX5090\?\): measure its rollouts_per_s"):
        gpu_named("RTX5080")

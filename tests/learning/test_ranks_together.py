"""A learner of several ranks, as real processes that meet over loopback."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from rank_jobs import STEPS, by_objective, opened, published, trained
from rank_processes import run_ranks, told
from trajectories import learning_config, saved, tiny_qwen3

from echo2.learning import checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Configuration and model of a run in float64."""
    folder = tmp_path_factory.mktemp("ranks")
    config = learning_config(
        saved(tiny_qwen3(), folder / "model"), compute_dtype="float64", lr=1e-3, kl_beta=0.05, weight_decay=0.1,
        micro_batch_tokens=25, logits_chunk_tokens=7, activation_checkpointing=True,
    )  # fmt: skip
    saved(tiny_qwen3(tied=False), folder / "other")
    config = config.model_copy(update={"model": config.model.model_copy(update={"snapshot_dtype": "float32"})})
    (folder / "config.json").write_text(config.model_dump_json())
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[float]]:
    """The curve of one rank, which leaves a checkpoint of its first step for others to go on from."""

    async def train() -> list[list[float]]:
        learner = opened(folder, "whole", None)
        curve = await trained(learner, 1)
        await learner.save_checkpoint()
        return curve + await trained(learner, STEPS + 2)

    return asyncio.run(train())


@pytest.fixture(scope="module")
def two(folder: Path) -> dict[str, Any]:
    assert run_ranks(2, "two", folder, deadline_s=DEADLINE_S) == [0, 0], told(folder)
    found: dict[str, Any] = json.loads((folder / "two.json").read_text())
    shutil.copytree(folder / "run", folder / "kept")
    return found


@pytest.fixture(scope="module")
def four(folder: Path, two: dict[str, Any], alone: list[list[float]]) -> dict[str, Any]:
    for step in checkpoint.complete_steps(folder / "run" / "checkpoints"):
        assert step <= STEPS
    assert run_ranks(4, "four", folder, deadline_s=DEADLINE_S) == [0] * 4, told(folder)
    found: dict[str, Any] = json.loads((folder / "four.json").read_text())
    return found


def losses(curve: list[list[float]]) -> list[float]:
    return [line[0] for line in curve]


def test_two_ranks_have_the_loss_curve_of_one(alone: list[list[float]], two: dict[str, Any]) -> None:
    assert losses(two["curve"]) == pytest.approx(losses(alone[:STEPS]), abs=1e-5)
    assert [line[3] for line in two["curve"]] == [line[3] for line in alone[:STEPS]]


def test_four_ranks_have_the_loss_curve_of_one(alone: list[list[float]], four: dict[str, Any]) -> None:
    assert losses(four["straight"]) == pytest.approx(losses(alone[1:STEPS]), abs=1e-5)


def test_resuming_with_as_many_ranks_gives_the_same_bits(two: dict[str, Any]) -> None:
    assert two["resumed"] == [[10, True], [10, True]]


async def test_one_two_and_four_ranks_go_on_from_each_others_checkpoints(
    folder: Path, alone: list[list[float]], four: dict[str, Any]
) -> None:
    assert four["begun"] == STEPS
    assert losses(four["curve"]) == pytest.approx(losses(alone[STEPS : STEPS + 2]), abs=1e-5)
    last = opened(folder, "run", None)
    assert last.step == STEPS + 2
    await trained(last, STEPS + 3)


async def test_the_snapshot_of_several_ranks_is_that_of_one_byte_for_byte(folder: Path, two: dict[str, Any]) -> None:
    one = opened(folder, "kept", None)
    assert one.step == STEPS
    assert await published(one, None) == two["root"]
    assert one.initial_weights_hash == two["hash"]


def test_an_audit_by_several_ranks_looks_at_as_many_rows(folder: Path, two: dict[str, Any]) -> None:
    assert len(two["audit"]) == 8
    assert len({(group, index) for group, index, _ in two["audit"]}) == 8


def test_few_rows_no_loss_and_gradients_that_are_not_finite_are_met_alike(two: dict[str, Any]) -> None:
    (one, silent, endless) = two["awkward"]
    assert one == [1.0, 1.0, 0.0, 1.0]
    assert silent == [0.0, 2.0, 0.0, 0.0]
    assert endless == [0.0, 1.0, 1.0, 0.0]


def test_what_befalls_one_rank_all_raise(two: dict[str, Any]) -> None:
    assert two["faults"] == [[f"{kind}: the disk is gone"] * 2 for kind in ("DiskFull", "UserError", "IntegrityError")]


def test_ranks_that_read_other_configurations_or_folders_say_so_alike(two: dict[str, Any]) -> None:
    assert two["differ"][0] == two["differ"][1]
    other, blind = json.loads(two["differ"][0])
    assert "rank 1 reads another than rank 0" in other
    assert "rank 1 does not see what rank 0 wrote" in blind


def test_a_checkpoint_of_another_model_is_refused_by_every_rank(two: dict[str, Any]) -> None:
    assert two["stranger"][0] == two["stranger"][1]
    assert "config.json must be the one that the checkpoint of step" in two["stranger"][0]


async def test_objectives_that_look_at_the_whole_update_see_all_ranks(folder: Path, two: dict[str, Any]) -> None:
    for name, curve in (await by_objective(folder, None)).items():
        for ours, theirs in zip(curve, two["objectives"][name], strict=True):
            assert theirs == pytest.approx(ours, rel=1e-5, abs=1e-5), name


def test_ranks_compute_in_bfloat16_and_keep_float32(two: dict[str, Any]) -> None:
    half = two["half"]
    assert half["bfloat16 passes"] == "torch.bfloat16"
    assert half["masters"] == ["torch.float32"]
    assert half["bfloat16"] != half["float32"]
    assert half["bfloat16"] == pytest.approx(half["float32"], rel=0.1, abs=0.05)


def test_all_ranks_split_when_one_runs_out_of_memory_and_train_the_same(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    assert run_ranks(2, "short", tmp_path, deadline_s=90.0) == [0, 0], told(tmp_path)
    found = json.loads((tmp_path / "short.json").read_text())
    for case in ("forward", "backward"):
        for plenty, scarce in zip(found["plenty"], found[case], strict=True):
            assert scarce[:5] == pytest.approx(plenty[:5], rel=1e-6, abs=1e-9), case
        splits, sizes = ([line[field] for line in found[case]] for field in (5, 6))
        assert splits[0] >= 1 and splits[1:] == [0, 0], case
        assert sizes[0] == sizes[2] <= 20, case
    assert found["audit"] == 8
    assert found["alone"][0] == found["alone"][1]
    assert "a trajectory must fit into the learner's memory alone" in found["alone"][0]


def test_a_rank_that_vanishes_ends_the_others_at_once(folder: Path, two: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    assert run_ranks(2, "dies", tmp_path, deadline_s=60.0) == [0, 9], told(tmp_path)
    found = json.loads((tmp_path / "dies.json").read_text())
    assert found["lost"], found["words"]

"""Adapters that two ranks train together, as real processes that meet over loopback."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rank_jobs import opened_adapters, published, trained
from rank_processes import run_ranks, told
from trajectories import learning_config, saved, tiny_qwen3

from echo2.config.lora import LoraSection
from echo2.learning import checkpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


async def test_two_ranks_train_the_adapters_of_one_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    config = learning_config(
        saved(tiny_qwen3(), tmp_path / "model"), compute_dtype="float64", lr=1e-2, kl_beta=0.05, weight_decay=0.1,
        micro_batch_tokens=25, activation_checkpointing=True,
    )  # fmt: skip
    model = config.model.model_copy(update={"snapshot_dtype": "float32"})
    config = config.model_copy(update={"model": model, "lora": LoraSection(rank=3, alpha=6.0)})
    (tmp_path / "config.json").write_text(config.model_dump_json())
    alone, _ = opened_adapters(tmp_path, "alone", None)
    curve = await trained(alone, 6)

    assert run_ranks(2, "adapters", tmp_path, deadline_s=240.0) == [0, 0], told(tmp_path)
    found = json.loads((tmp_path / "adapters.json").read_text())
    assert [line[0] for line in found["curve"]] == pytest.approx([line[0] for line in curve], abs=1e-5)
    assert found["same"] == [True, True]
    assert found["hash"] == alone.initial_weights_hash
    assert found["kept"] == sorted(alone._policy.stored())
    assert len(found["audit"]) == 8

    one, _ = opened_adapters(tmp_path, "run", None)
    assert checkpoint.complete_steps(tmp_path / "run" / "checkpoints") == [3]
    assert one.step == 3, "one rank goes on from what two left"
    await trained(one, 6)
    assert await published(one, None) != ""

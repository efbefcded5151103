"""A run with adapters through real processes: learner, coordinator, worker, and what is exported of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from echo2.cli.adapters import write_adapter
from echo2.cli.export import kept_versions, write_model
from echo2.learning.loading import load_causal_lm
from echo2.run.api import Run
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]


class Quiet:
    def emit(self, kind: str, **fields: Any) -> None: ...


def config(runs: Path) -> dict[str, Any]:
    return {
        "run": {"name": "lora", "dir": str(runs), "steps": 3, "mode": "sync"},
        "model": {"path": "tiny:qwen3", "snapshot_dtype": "bfloat16", "warm_start_steps": 60},
        "lora": {"rank": 2, "alpha": 4.0, "targets": ["q_proj", "v_proj"]},
        "tasks": [{"name": "arithmetic", "options": {"style": "symbols", "max_operand": 9}}],
        "rollout": {"rollouts_per_step": 64, "group_size": 8, "max_new_tokens": 4},
        "learning": {"lr": 1e-2, "threads": 1, "device": "cpu", "kl_beta": 0.01},
        "workers": {"local": 1, "threads": 1, "usd_per_h": 0.5},
        "coordinator": {"heartbeat_s": 0.5},
    }


def test_after_version_0_adapters_alone_travel_and_are_what_the_learner_trains(tmp_path: Path) -> None:
    run = Run(config(tmp_path / "runs"), events=Quiet())
    with run:
        lines = list(run)
    assert len(lines) == 3
    folder = run.folder
    kept = kept_versions(folder)
    whole = (kept[Policy(0, 0)] / OBJECT_NAME).stat().st_size
    sent = (kept[Policy(0, 3)] / "delta").stat().st_size
    assert sent < whole / 20, f"{sent} of {whole} bytes"
    assert lines[-1].publish_bytes == sent
    told = [json.loads(line) for line in (folder.root / "metrics.jsonl").read_text().splitlines()]
    audits = [found for line in told for found in line.get("audited", {}).values()]
    assert audits, "log-probs of merged weights were compared"
    assert max(found["mean_nats"] for found in audits) < 0.05

    write_model(kept[Policy(0, 3)], folder.root / "assets", tmp_path / "merged")
    write_model(kept[Policy(0, 0)], folder.root / "assets", tmp_path / "base")
    write_adapter(kept[Policy(0, 3)], folder.load(), tmp_path / "adapter")
    assert {path.name for path in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors",
    }  # fmt: skip
    merged, base = (load_file(tmp_path / name / OBJECT_NAME) for name in ("merged", "base"))
    changed = {name for name in merged if not torch.equal(merged[name], base[name])}
    assert changed
    assert all("q_proj" in name or "v_proj" in name for name in changed)
    assert load_causal_lm(tmp_path / "merged", torch.device("cpu")) is not None

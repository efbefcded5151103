from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.errors import UserError
from echo2.metrics import StepMetrics
from echo2.run.folder import RunFolder
from echo2.run.metrics_tail import MetricsTail


def config(root: Path, *overrides: str, **run: Any) -> Config:
    tables = {"run": {"dir": str(root), "name": "r", **run}, "rollout": {"engine": "scripted"}}
    return build_config(tables, overrides, check_places=False)


def test_a_prepared_folder_holds_the_configuration_it_goes_by(tmp_path: Path) -> None:
    made = config(tmp_path, "learning.lr=0.5")
    folder = RunFolder.of(made)
    folder.prepare(made, resume=False)
    assert folder.load() == made


def test_an_existing_run_is_not_begun_twice(tmp_path: Path) -> None:
    made = config(tmp_path)
    RunFolder.of(made).prepare(made, resume=False)
    with pytest.raises(UserError, match="exists already; continue it with --resume"):
        RunFolder.of(made).prepare(made, resume=False)


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    made = config(tmp_path)
    with pytest.raises(UserError, match="--resume needs a run folder"):
        RunFolder.of(made).prepare(made, resume=True)
    assert not RunFolder.of(made).root.exists()


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    made = config(tmp_path)
    RunFolder.of(made).root.mkdir()
    (RunFolder.of(made).root / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="holds other files"):
        RunFolder.of(made).prepare(made, resume=False)


def test_a_resumed_run_may_go_on_longer_but_not_with_other_prompts(tmp_path: Path) -> None:
    made = config(tmp_path, steps=10)
    folder = RunFolder.of(made)
    folder.prepare(made, resume=False)
    folder.prepare(config(tmp_path, "learning.lr=0.001", steps=20), resume=True)
    assert folder.load().run.steps == 20
    with pytest.raises(UserError, match=r"run\.seed was 0 and would be 7.*rollout\.group_size was 8 and would be 4"):
        folder.prepare(config(tmp_path, "rollout.group_size=4", seed=7), resume=True)
    assert folder.load().run.seed == 0


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="must be a run folder"):
        RunFolder(tmp_path).load()


def line(step: int, incarnation: int = 0, reward: float = 0.0) -> bytes:
    known: dict[str, Any] = {"step": step, "policy_incarnation": incarnation, "reward_mean": reward}
    fields: dict[str, Any] = {}
    for field in msgspec.structs.fields(StepMetrics):
        fields[field.name] = {} if "dict" in str(field.type) else 0
    return msgspec.json.encode(fields | known) + b"\n"


def test_each_metrics_line_is_seen_once_though_the_file_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = MetricsTail(path)
    assert tail.new_lines() == []
    path.write_bytes(line(0) + line(1)[:20])
    assert [metrics.step for metrics in tail.new_lines()] == [0]
    path.write_bytes(line(0) + line(1))
    assert [metrics.step for metrics in tail.new_lines()] == [1]
    assert tail.new_lines() == []
    path.unlink()
    path.write_bytes(line(0) + line(1) + line(2))
    assert [metrics.step for metrics in tail.new_lines()] == [2]
    path.write_bytes(line(0) + line(1, incarnation=1))
    assert [metrics.step for metrics in tail.new_lines()] == [1]

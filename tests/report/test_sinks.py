from __future__ import annotations

import errno
import importlib.machinery
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from echo2.errors import ConfigError
from echo2.metrics import StepMetrics
from echo2.report.sinks import Guarded, JsonLines, JsonlSink, TensorBoardSink, open_sinks, scalars

Make = Callable[..., StepMetrics]


def steps_in(path: Path) -> list[int]:
    return [msgspec.json.decode(line)["step"] for line in path.read_bytes().splitlines()]


def test_each_step_is_a_line_that_reads_back_whole(tmp_path: Path, make_metrics: Make) -> None:
    sink = JsonlSink(tmp_path / "run" / "metrics.jsonl")
    sink.write(make_metrics(0))
    sink.close()
    line = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert line.endswith(b"\n")
    assert msgspec.json.decode(line, type=StepMetrics) == make_metrics(0)


def test_a_torn_last_line_is_removed_on_restart(tmp_path: Path, make_metrics: Make) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = msgspec.json.encode(make_metrics(0)) + b"\n"
    path.write_bytes(whole + msgspec.json.encode(make_metrics(1))[:40])
    sink = JsonlSink(path)
    assert sink.last_step == 0
    assert path.read_bytes() == whole
    sink.write(make_metrics(1))
    sink.close()
    assert steps_in(path) == [0, 1]


def test_a_file_that_is_one_torn_line_starts_afresh(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "st')
    lines = JsonLines(path)
    assert lines.last_line is None
    lines.append({"kind": "started"})
    lines.close()
    assert path.read_bytes() == b'{"kind":"started"}\n'


def test_a_step_written_again_after_a_restart_stays_one_line(tmp_path: Path, make_metrics: Make) -> None:
    path = tmp_path / "metrics.jsonl"
    for steps in ((0, 1), (1, 2)):
        sink = JsonlSink(path)
        for step in steps:
            sink.write(make_metrics(step))
        sink.close()
    assert steps_in(path) == [0, 1, 2]


def test_a_new_incarnation_may_train_a_step_again(tmp_path: Path, make_metrics: Make) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    for step, incarnation in ((0, 0), (1, 0), (1, 1)):
        sink.write(make_metrics(step, policy_incarnation=incarnation))
    sink.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1, 1]


def test_a_full_disk_leaves_whole_lines(tmp_path: Path, make_metrics: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    sink.write(make_metrics(0))
    write = os.write

    def half(file: int, data: bytes) -> int:
        write(file, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left"):
        sink.write(make_metrics(1))
    monkeypatch.undo()
    assert steps_in(tmp_path / "metrics.jsonl") == [0]
    sink.write(make_metrics(1))
    sink.close()
    assert steps_in(tmp_path / "metrics.jsonl") == [0, 1]


def test_a_failing_sink_is_reported_once_and_never_raises(make_metrics: Make) -> None:
    class Broken:
        writes = 0

        def write(self, metrics: StepMetrics) -> None:
            self.writes += 1
            raise RuntimeError("no network")

        def close(self) -> None:
            raise RuntimeError("no network")

    said: list[str] = []
    broken = Broken()
    sink = Guarded(broken, "Weights & Biases", said.append)
    for step in range(3):
        sink.write(make_metrics(step))
    sink.close()
    assert broken.writes == 1
    assert said == ["Weights & Biases stopped taking metrics, the run goes on without it: RuntimeError('no network')"]


def test_a_missing_package_is_named_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"metrics\.wandb_project needs the package wandb.*pip install 'echo2\[wandb\]'"
    ):
        open_sinks(
            run_dir=tmp_path,
            run_id="run-1",
            run_name="demo",
            tensorboard=False,
            wandb_project="echo",
            config={},
            report=lambda sentence: None,
        )
    assert not (tmp_path / "metrics.jsonl").exists()


def test_a_sink_that_cannot_be_opened_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # it has no init, as good as one that raises
    said: list[str] = []
    sinks = open_sinks(
        run_dir=tmp_path,
        run_id="run-1",
        run_name="demo",
        tensorboard=False,
        wandb_project="echo",
        config={},
        report=said.append,
    )
    assert [type(sink) for sink in sinks] == [JsonlSink]
    assert len(said) == 1
    assert said[0].startswith("Weights & Biases could not be opened, the run goes on without it")
    sinks[0].close()


def test_only_the_file_is_written_unless_more_is_asked_for(tmp_path: Path) -> None:
    sinks = open_sinks(
        run_dir=tmp_path,
        run_id="run-1",
        run_name="demo",
        tensorboard=False,
        wandb_project="",
        config={},
        report=lambda sentence: None,
    )
    assert [type(sink) for sink in sinks] == [JsonlSink]
    for sink in sinks:
        sink.close()


def test_unknown_numbers_are_not_reported_as_zero(make_metrics: Make) -> None:
    named = scalars(make_metrics(0))
    assert "time/t_bcast_s" not in named
    assert named["learner/prox_s"] == 0.4
    assert named["staleness/staleness_max"] == 3.0
    assert named["relay/workers_sent_bytes"] == 2_000_000
    assert "snapshot/changed_share" not in named
    assert named["rescoring/workers_set_aside"] == 0.0


def test_each_task_of_a_mixture_has_its_numbers(make_metrics: Make) -> None:
    named = scalars(make_metrics(1, rows_by_task={"easy": 8, "game": 4}, pass_share_by_task={"easy": 0.75}))
    assert (named["rows_by_task/easy"], named["rows_by_task/game"], named["pass_share_by_task/easy"]) == (8, 4, 0.75)
    assert "reward_by_task/arithmetic" in named


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_files_hold_the_scalars(tmp_path: Path, make_metrics: Make) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    sink = TensorBoardSink(tmp_path / "tensorboard")
    sink.write(make_metrics(7))
    sink.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    values = {v.tag: v.tensor.float_val[0] for e in EventFileLoader(str(file)).Load() for v in e.summary.value}
    assert values["reward/reward_mean"] == pytest.approx(make_metrics(7).reward_mean)
    assert values["cost/cost_usd"] == pytest.approx(make_metrics(7).cost_usd)

"""Learners of two ranks inside whole runs: killed, frozen, told to stop, and under torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save
from transformers import LlamaConfig, LlamaForCausalLM

from echo2.config.load import build_config
from echo2.config.render import render_config
from echo2.errors import UserError
from echo2.learning.tiny import character_tokenizer
from echo2.metrics import StepMetrics
from echo2.run.api import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 8
PATIENCE_S = 280.0
SOURCE = Path(__file__).parents[2] / "src"


class Noted:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def emit(self, kind: str, **fields: Any) -> None:
        self.kinds.append(kind)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def config(model: Path, runs: Path, name: str, **learning: Any) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(runs), "steps": STEPS, "mode": "sync"},
        "model": {"path": str(model), "snapshot_dtype": "float32"},
        "tasks": [{"name": "arithmetic"}],
        "rollout": {"engine": "scripted", "rollouts_per_step": 16, "group_size": 4, "max_new_tokens": 8},
        "learning": {"lr": 1e-3, "threads": 1, "device": "cpu", "ranks": 2} | learning,
        "workers": {"local": 1},
        "coordinator": {"heartbeat_s": 0.2, "dead_after_s": 20.0},
    }


def final_bits(run: Run) -> dict[str, dict[str, bytes]]:
    """Tensors by name, by file; a header may name them in any order."""
    last = run.folder.root / "checkpoints" / f"step-{STEPS:08d}"
    return {
        path.name: {name: save({"": value}) for name, value in load_file(path).items()}
        for path in sorted(last.glob("*.safetensors"))
    }


def wait_for_steps(run: Run, count: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while len(run.metrics) < count:
        run.new_metrics()
        assert not run.is_over, "the run ended before it could be disturbed"
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def ranks_of(root: Path) -> dict[int, int]:
    """Process ids of the ranks that train in this run folder, by rank."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes().split(b"\0")
            variables = dict(pair.partition(b"=")[::2] for pair in (place / "environ").read_bytes().split(b"\0"))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if b"learner" in words and str(root).encode() in words and b"RANK" in variables:
            found[int(variables[b"RANK"])] = int(place.name)
    return found


def trained(lines: tuple[StepMetrics, ...]) -> list[tuple[int, float]]:
    return [(line.step, line.reward_trained_mean) for line in lines]


def test_a_run_whose_ranks_are_killed_and_frozen_ends_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    with Run(config(model, tmp_path, "straight"), events=Noted()) as straight:
        lines = straight.result().metrics
    assert len(lines) == STEPS
    assert not ranks_of(straight.folder.root)
    events = Noted()
    with Run(config(model, tmp_path, "broken", collective_timeout_s=8.0), events=events) as broken:
        wait_for_steps(broken, 2)
        os.kill(ranks_of(broken.folder.root)[1], signal.SIGKILL)
        wait_for_steps(broken, 4)
        os.kill(ranks_of(broken.folder.root)[1], signal.SIGSTOP)  # it hangs; the others notice by their time-out
        result = broken.result()
    assert events.kinds.count("program_restarted") >= 2
    assert trained(result.metrics) == trained(lines)
    assert final_bits(broken) == final_bits(straight)
    assert len(final_bits(broken)) == 2, "each rank wrote its shard"


def test_a_stop_is_heard_by_every_rank_and_one_rank_goes_on_from_two(model: Path, tmp_path: Path) -> None:
    tables = config(model, tmp_path, "stopped")
    with Run(tables, events=Noted()) as first:
        wait_for_steps(first, 2)
        first.stop("enough")
        done = len(first.result().metrics)
    assert not ranks_of(first.folder.root)
    tables["learning"]["ranks"] = 1
    with Run(tables, resume=True, events=Noted()) as second:
        result = second.result()
    assert [line.step for line in result.metrics] == list(range(STEPS))
    assert done < STEPS
    assert list(final_bits(second)) == ["optimizer.safetensors", "weights.safetensors"]


def test_a_mistake_that_every_rank_sees_ends_the_run_with_its_sentence(model: Path, tmp_path: Path) -> None:
    first = Run(config(model, tmp_path, "mistaken"), events=Noted())
    with first:
        wait_for_steps(first, 1)
        first.stop("enough")
        first.result()
    for state in first.folder.checkpoints.glob("*/state.json"):
        state.write_text(state.read_text().replace('"run_id":"', '"run_id":"x'))
        marker = state.with_name("COMPLETE.json")
        sizes = json.loads(marker.read_text()) | {"state.json": state.stat().st_size}
        marker.write_text(json.dumps(sizes))
    with (
        pytest.raises(UserError, match="must be of run"),
        Run(config(model, tmp_path, "mistaken"), resume=True, events=Noted()) as second,
    ):
        second.result()


def test_torchrun_launches_the_ranks_of_a_learner(model: Path, tmp_path: Path) -> None:
    tables = config(model, tmp_path, "torchrun", ranks=1)
    run = Run(tables, events=Noted())
    run.folder.prepare(run.config, resume=False)
    root = run.folder.root
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    programs = [
        (sys.executable, "-m", "echo2", "coordinator", str(root)),
        (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         "-m", "echo2", "learner", str(root)),
        (sys.executable, "-m", "echo2", "worker", str(root / "join" / "worker"), "--dir", str(tmp_path / "w")),
    ]  # fmt: skip
    started: list[subprocess.Popen[bytes]] = []
    ends_s = time.monotonic() + PATIENCE_S
    try:
        for number, command in enumerate(programs):
            with (tmp_path / f"{number}.log").open("wb") as log:
                started.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            while not (root / "coordinator.json").exists() or not (root / "join" / "worker").exists():
                assert time.monotonic() < ends_s
                time.sleep(0.1)
        codes = [process.wait(max(1.0, ends_s - time.monotonic())) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    told = "\n".join(path.read_text() for path in sorted(tmp_path.glob("*.log")))
    assert codes == [0, 0, 0], told
    assert len(final_bits(run)) == 2


def test_a_whole_run_under_torchrun_is_one_run_with_as_many_ranks(model: Path, tmp_path: Path) -> None:
    tables = config(model, tmp_path, "whole", ranks=1)
    tables["run"]["steps"] = 2
    file = tmp_path / "run.toml"
    file.write_text(render_config(build_config(tables)))
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               "-m", "echo2", "train", str(file))  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("steps        1 to 2") == 1
    shards = list((tmp_path / "whole" / "checkpoints" / "step-00000002").glob("*.safetensors"))
    assert len(shards) == 2, "each rank wrote its shard"

"""The real programs as real processes: I3 and bit-exact resume under kill -9."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from echo2.broadcast.snapshot import load_manifest, verify_snapshot
from echo2.learning.tiny import character_tokenizer
from echo2.metrics import StepMetrics
from echo2.run.api import Run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

STEPS = 10
"""Enough for two crashes in between: a step takes some tenths of a second."""
PATIENCE_S = 280.0


class Quiet:
    def emit(self, kind: str, **fields: Any) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose vocabulary covers the bytes that the scripted engine speaks."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(shape).save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def config(model: Path, runs: Path, name: str, **changes: Any) -> dict[str, Any]:
    tables: dict[str, Any] = {
        # Generate, then train: which rows a batch holds does not depend on who is faster.
        "run": {"name": name, "dir": str(runs), "steps": STEPS, "mode": "sync"},
        "model": {"path": str(model), "snapshot_dtype": "float32"},
        "tasks": [{"name": "arithmetic"}],
        "rollout": {"engine": "scripted", "rollouts_per_step": 16, "group_size": 4, "max_new_tokens": 8},
        "learning": {"lr": 1e-3, "threads": 1, "device": "cpu"},
        "workers": {"local": 1, "usd_per_h": 0.5},
        "coordinator": {"heartbeat_s": 0.2, "dead_after_s": 20.0},
    }
    for section, keys in changes.items():
        tables[section] = {**tables.get(section, {}), **keys}
    return tables


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.02)


def wait_for_steps(run: Run, count: int) -> None:
    """Until the run has ``count`` lines of metrics, those of an earlier life included."""

    def enough() -> bool:
        run.new_metrics()
        assert not run.is_over, "the run ended before it could be disturbed: it needs more steps"
        return len(run.metrics) >= count

    wait_for(enough, f"step {count}")


def process_of(program: str, run: Run) -> int:
    launch = run._launch
    assert launch is not None
    child = next(c for c in (launch._coordinator, *launch._others) if c.spec.name.startswith(program))
    assert child.process is not None
    return child.process.pid


def kill(program: str, run: Run) -> None:
    """kill -9 of one program of the run."""
    os.kill(process_of(program, run), signal.SIGKILL)


def check_lines(lines: list[StepMetrics], budget: int) -> None:
    assert [line.step for line in lines] == list(range(len(lines)))
    for line in lines:
        assert line.generated == line.trained + line.expired + line.refused + line.buffered + line.failed
        assert line.staleness_max <= budget
    for earlier, later in pairwise(lines):
        for count in ("generated", "trained", "expired", "refused", "failed", "cost_usd"):
            assert getattr(later, count) >= getattr(earlier, count), count


def final_bytes(folder: Path) -> dict[str, bytes]:
    last = folder / "checkpoints" / f"step-{STEPS:08d}"
    return {path.name: path.read_bytes() for path in sorted(last.glob("*.safetensors"))}


def relays_of(pid: int) -> list[int]:
    """Relay processes that process ``pid`` started."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rsplit(")", 1)[1].split()[1])
            command = status.with_name("cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid and b"echo2.broadcast.relay" in command:
            found.append(int(status.parent.name))
    return found


def check_snapshots(run: Run) -> None:
    """I6: every snapshot that lies with a worker is what was signed, and the same with all of them and the coordinator;
    which versions each of them still holds at the end is a matter of time."""
    seen: dict[str, str] = {}
    folders = list(run.folder.root.glob("workers/*/snapshots/*"))
    assert folders
    for folder in (*(path.parent for path in run.folder.root.glob("snapshots/*/manifest.json")), *folders):
        manifest = load_manifest(folder)
        verify_snapshot(folder, manifest)
        assert seen.setdefault(folder.name, manifest.object_root) == manifest.object_root
    assert len(seen) > 1


def test_a_run_that_was_killed_and_resumed_ends_with_the_same_bits(model: Path, tmp_path: Path) -> None:
    star = {"workers": {"local": 2}, "broadcast": {"topology": "star"}}
    straight = Run(config(model, tmp_path, "straight", **star), events=Quiet())
    with straight:
        lines = list(straight)
    check_lines(lines, budget=0)
    assert len(lines) == STEPS
    assert set(lines[-1].sent_bytes_by_node.values()) == {0}, "in a star workers send nothing to each other"
    assert lines[-1].seed_sent_bytes > lines[-1].publish_bytes
    check_snapshots(straight)

    broken = Run(config(model, tmp_path, "broken"), events=Quiet())
    with broken:
        wait_for_steps(broken, 2)
        kill("learner", broken)
        kill("coordinator", broken)
        broken.stop("the power went off")
        broken.stop("…without a word")  # a second wish does not wait for order
    resumed = Run(config(model, tmp_path, "broken"), resume=True, events=Quiet())
    with resumed:
        wait_for_steps(resumed, len(resumed.metrics) + 1)
        kill("coordinator", resumed)
        result = resumed.result()
    check_lines(list(result.metrics), budget=0)
    assert len(result.metrics) == STEPS
    assert [line.reward_trained_mean for line in result.metrics] == [line.reward_trained_mean for line in lines]
    assert set(final_bytes(straight.folder.root)) >= {"weights.safetensors"}
    assert final_bytes(straight.folder.root) == final_bytes(broken.folder.root)


def test_workers_join_over_tls_pass_snapshots_on_and_a_killed_one_costs_nothing_but_time(
    model: Path, tmp_path: Path
) -> None:
    run = Run(
        config(
            # Mode sync: a version is evaluated before anything is trained on it, however fast the steps are.
            model, tmp_path, "tls", run={"steps": 6}, workers={"local": 3},
            coordinator={"tls": "on", "dead_after_s": 5.0}, eval={"every_steps": 2, "prompts": 4},
            # In a ring somebody has to pass on, however fast the coordinator is.
            broadcast={"topology": "ring"},
        ),
        events=Quiet(),
    )  # fmt: skip
    with run:
        wait_for_steps(run, 1)
        worker = process_of("worker", run)
        relays = relays_of(worker)
        assert len(relays) == 1
        os.kill(worker, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{relays[0]}").exists(), "the killed worker's relay to end")
        assert "tls=1" in run.join_string()
        result = run.result()
    check_lines(list(result.metrics), budget=0)
    assert len(result.metrics) == 6
    evaluations = [json.loads(line) for line in (run.folder.root / "evals.jsonl").read_text().splitlines()]
    assert [(line["version"], line["prompts"]) for line in evaluations[:2]] == [(2, 4), (4, 4)]
    last = result.metrics[-1]
    assert last.workers_sent_bytes > 0
    assert last.delta_share == pytest.approx(5 / 6)  # the last version is published after the last line
    assert last.publish_bytes < last.snapshot_bytes
    check_snapshots(run)


def test_a_pool_of_local_machines_is_filled_replaced_and_given_back(model: Path, tmp_path: Path) -> None:
    offers = tmp_path / "offers.csv"
    offers.write_text("name,gpu,count,usd_per_h,rollouts_per_s\nhere,cpu,2,0.5,0.5\n")
    tables = config(
        model, tmp_path, "pool", run={"mode": "echo2", "steps": 40}, staleness={"budget": 3}, workers={"local": 0},
        provisioning={"period_s": 0.5, "sustain": 2, "cool_down_s": 1.0, "start_s": 120.0, "learner_usd_per_h": 2.0},
        coordinator={"dead_after_s": 5.0},
    )  # fmt: skip
    tables["pools"] = [{"kind": "local", "offers": str(offers)}]
    run = Run(tables, events=Quiet())
    with run:
        wait_for_steps(run, 1)
        killed, process = next(iter(workers_on("here", run).items()))
        os.kill(process, signal.SIGKILL)
        result = run.result()
        assert not workers_on("here", run)
    check_lines(list(result.metrics), budget=3)
    assert len(result.metrics) == 40
    events = [json.loads(line) for line in (run.folder.root / "events.jsonl").read_text().splitlines()]
    ordered = [event for event in events if event["kind"] == "provisioning_activate"]
    names = {name for event in ordered for name in event["machine_ids"].split(",")}
    assert len(names - {killed}) >= 1, "replaced"
    assert names == {event["machine"] for event in events if event["kind"] == "machine_stopped"}
    assert names >= {event["name"] for event in events if event["kind"] == "worker_joined"}
    last = result.metrics[-1]
    hours = last.elapsed_s / 3600
    assert 0.0 < last.cost_usd < (2.0 + 2 * 0.5) * hours, "the learner and two machines at most, from when they came"
    assert sum(line.step_cost_usd for line in result.metrics) == pytest.approx(last.cost_usd)


def workers_on(offer: str, run: Run) -> dict[str, int]:
    """Process ids of workers that a local pool started, by machine."""
    found = {}
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = cmdline.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        here = str(run.folder.root).encode()
        if b"worker" in words and any(here in word for word in words):
            name = words[words.index(b"--name") + 1].decode()
            if name.startswith(f"{offer}-"):
                found[name] = int(cmdline.parent.name)
    return found

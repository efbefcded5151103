"""The main job, from warm start to report, with a server as the workers' engine.

SGLang and Parallax are the stand-ins of ``fake_servers``, by real HTTP. vLLM is a real one: ECHO2_VLLM_PYTHON names an
interpreter that has it (docs/servers.md says how it is made).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fake_servers import Backend, FakeServer, FakeSglang, listening

from echo2.config.sections import ModelSection
from echo2.learning.pretrained import resolve_model
from echo2.report.html import write_report
from echo2.run.api import Run, RunResult

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(1800)]

VLLM = os.environ.get("ECHO2_VLLM_PYTHON", "")
STEPS, ROWS = 4, 32
SUPPORT = Path(__file__).parent.parent / "support"


class Noted:
    def emit(self, kind: str, **fields: Any) -> None: ...


def trained(engine: str, server: dict[str, Any], folder: Path) -> tuple[RunResult, Path]:
    """A whole run of STEPS steps, in which a policy is installed while others are being generated from."""
    tables: dict[str, Any] = {
        "run": {"name": engine, "dir": str(folder), "steps": STEPS},
        "model": {"path": "tiny:qwen3", "snapshot_dtype": "float32", "warm_start_steps": 20},
        "tasks": [{"name": "arithmetic", "options": {"style": "symbols", "max_operand": 9}}],
        "rollout": {
            "engine": engine, "rollouts_per_step": ROWS, "group_size": 8, "max_new_tokens": 8, "concurrent_groups": 2,
        },
        "staleness": {"budget": 3, "publish_period": 2},
        "learning": {"lr": 2e-4, "threads": 1, "device": "cpu", "audit_rows": 8},
        "workers": {"local": 1, "threads": 1, "device": "cpu"},
        "server": server,
    }  # fmt: skip
    run = Run(tables, events=Noted())
    with run:
        return run.result(), run.folder.root


def check(result: RunResult, root: Path) -> list[dict[str, Any]]:
    """Everything was trained on, and installed policies were confirmed. Returns the events."""
    lines = result.metrics
    assert [line.step for line in lines] == list(range(STEPS))
    assert all(line.staleness_max <= 3 for line in lines)
    assert (lines[-1].trained, lines[-1].failed, lines[-1].refused) == (STEPS * ROWS, 0, 0)
    assert lines[-1].workers_set_aside == 0
    events = [json.loads(line) for line in (root / "events.jsonl").read_text().splitlines()]
    installed = [event["policy"] for event in events if event["kind"] == "installed"]
    assert installed[0] == "0.0"
    assert len(installed) >= 2, "a newer policy was installed while the run went on"
    assert "w0" in write_report(root).read_text()
    return events


def check_logprobs(result: RunResult) -> None:
    """The learner compared some with its own, of the version that each record names."""
    compared = [worker for line in result.metrics for worker in line.audited.values()]
    assert sum(worker.tokens for worker in compared) > 0
    assert all(worker.mean_nats < 1e-3 for worker in compared)


@contextmanager
def served(fake: FakeServer) -> Iterator[str]:
    """Its address; it lives in a thread of its own while a run is awaited."""
    loop = asyncio.new_event_loop()
    told: asyncio.Queue[str] = asyncio.Queue()
    over = asyncio.Event()

    async def live(application: web.Application) -> None:
        async with listening(application) as url:
            await told.put(url)
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(fake.application()),))
    thread.start()
    try:
        yield asyncio.run_coroutine_threadsafe(told.get(), loop).result(60)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def test_a_run_with_sglang_trains_on_its_logprobs_and_changes_its_weights_as_it_goes(tmp_path: Path) -> None:
    fake = FakeSglang(Backend(context=256))
    fake.backend.load(resolve_model(ModelSection(path="tiny:qwen3"), tmp_path / "others", seed=9))
    with served(fake) as url:
        result, root = trained("sglang", {"url": url}, tmp_path)
    check(result, root)
    check_logprobs(result)
    assert result.metrics[-1].learner["unweighted_share"] == 0.0
    assert fake.label != "default"


def test_a_run_with_parallax_starts_it_anew_for_each_policy_and_says_that_it_has_no_logprobs(tmp_path: Path) -> None:
    command = [sys.executable, str(SUPPORT / "stand_in_parallax.py")]
    result, root = trained("parallax", {"command": command, "start_timeout_s": 120.0}, tmp_path)
    check(result, root)
    assert result.metrics[-1].learner["unweighted_share"] == 1.0
    words = (root / "logs" / "worker-w0.log").read_text()
    assert "replies are text" in words
    assert "server restarting" in words


@pytest.mark.skipif(not VLLM, reason="ECHO2_VLLM_PYTHON names no interpreter with vLLM")
def test_a_run_with_a_real_vllm_trains_on_its_logprobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    server = {
        "command": [VLLM, "-m", "vllm.entrypoints.openai.api_server"],
        "arguments": ["--enforce-eager", "--max-num-seqs", "32"], "start_timeout_s": 900.0,
    }  # fmt: skip
    result, root = trained("vllm", server, tmp_path)
    check(result, root)
    check_logprobs(result)
    assert result.metrics[-1].learner["unweighted_share"] == 0.0

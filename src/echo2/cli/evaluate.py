"""``echo2 eval``: the tasks' own metrics of a model, on held-out prompts, without a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from echo2.cli.evaluate_view import evaluation_text
from echo2.cli.output import JsonFlag, SetOption, aside, note, print_json
from echo2.data.attempts import interval, measures
from echo2.errors import TaskFault

if TYPE_CHECKING:
    from echo2.config.root import Config
    from echo2.data.chat import ChatFormat
    from echo2.data.task import Played, Task
    from echo2.rollout.engine import Engine
    from echo2.types import Prompt

TOGETHER = 16
"""Prompts given to the engine at the same time."""
SHOWN_FAULTS = 20
"""Prompts whose failures are told one by one."""


class Scores(msgspec.Struct):
    rewards: dict[str, list[float]] = {}
    """Rewards of the finished replies of each prompt."""
    statuses: dict[str, int] = {}
    failed: int = 0
    """Replies that could not be had or scored; not zeros."""
    faults: dict[str, str] = {}
    """Why the first of them failed, by prompt."""
    played: list[Played] = []
    """The finished episodes."""

    def add(self, more: Scores) -> None:
        """Those of further prompts."""
        self.rewards |= more.rewards
        self.failed += more.failed
        self.faults |= more.faults
        self.played += more.played
        for status, count in more.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + count


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml|DIR", help="Configuration file, or a run's folder.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Model directory or hub id; the file's by default, or the newest version that DIR keeps.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="PATH", help="Another model: tell the difference on the same prompts."),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Score a model on held-out prompts: mean reward, avg@k and pass@k with 95 % intervals; of games, a table."""
    from echo2.cli.export import with_newest
    from echo2.cli.inputs import checked_config

    chosen = list(overrides or []) + ([f"model.path={model}"] if model else [])
    with aside(), tempfile.TemporaryDirectory(prefix="echo2-eval-") as folder:
        config = checked_config(run, chosen)
        other = None if against is None else checked_config(run, [*(overrides or []), f"model.path={against}"])
        name = ""
        if run.is_dir() and not any(text.partition("=")[0].strip() == "model.path" for text in chosen):
            config, name = with_newest(config, run, Path(folder) / "model")
        facts = compared(config, other, name)
    print_json(facts) if as_json else print(evaluation_text(facts))


def compared(config: Config, other: Config | None = None, name: str = "") -> dict[str, Any]:
    """What the model of ``config`` scores and, where another is given, what it has more on the same prompts.

    name: what the model is called; its path by default.
    """
    tasks = loaded(config)
    by_task = scored(config, tasks)
    # Tasks anew: an opponent that is a model belongs to the event loop in which it was first asked.
    others = None if other is None else scored(other, loaded(other))
    reports = {
        task.name: report(task, by_task[task.name], config.eval.samples, others[task.name] if others else None)
        for task, _ in tasks
    }
    name = name or _evaluated(config)
    facts = {"model": name, "tasks": list(reports), **summarise(merged(list(by_task.values()))), "by_task": reports}
    if other is not None and others is not None:
        facts["against"] = other.model.path
        facts |= difference(merged(list(by_task.values())), merged(list(others.values())))
    return facts


def loaded(config: Config) -> list[tuple[Task, float]]:
    from echo2.data.registry import load_task

    return [(load_task(section), section.weight) for section in config.tasks]


def difference(scores: Scores, other: Scores) -> dict[str, Any]:
    """Mean over the prompts that both have of what the first model's mean reward is more than the other's."""
    more = [
        fmean(found) - fmean(other.rewards[prompt])
        for prompt, found in scores.rewards.items()
        if prompt in other.rewards
    ]
    return {"reward_more": fmean(more) if more else None, "reward_more_ci95": interval(more)}


def scored(config: Config, tasks: list[tuple[Task, float]]) -> dict[str, Scores]:
    """By task, what the configuration's model scores on their held-out prompts."""
    by_task = {task.name: Scores() for task, _ in tasks}
    with tempfile.TemporaryDirectory(prefix="echo2-eval-") as folder:
        asyncio.run(_score(config, tasks, by_task, Path(folder)))
    return by_task


def summarise(scores: Scores) -> dict[str, Any]:
    """Mean over prompts of the mean over a prompt's replies, with the interval that the spread over prompts gives."""
    means = [sum(rewards) / len(rewards) for rewards in scores.rewards.values()]
    mean = sum(means) / len(means) if means else None
    return {
        "reward_mean": mean,
        "reward_ci95": interval(means),
        "prompts": len(means),
        "replies": sum(len(rewards) for rewards in scores.rewards.values()),
        "failed": scores.failed,
        "faults": [f"{prompt_id}: {reason}" for prompt_id, reason in scores.faults.items()][:SHOWN_FAULTS],
        "statuses": dict(sorted(scores.statuses.items())),
    }


def merged(parts: Sequence[Scores]) -> Scores:
    """Scores of several tasks as one; their prompts have different ids."""
    whole = Scores()
    for part in parts:
        whole.add(part)
    return whole


def report(task: Task, scores: Scores, samples: int, other: Scores | None = None) -> dict[str, Any]:
    """One task's figures: the metric it is known by, and whether ``samples`` replies a prompt give it."""
    facts = summarise(scores) | {"metric": str(task.metric), "excluded_rows": len(getattr(task, "excluded", []))}
    facts["table"] = _tabled(task, scores.played, None if other is None else other.played)
    if other is not None:
        facts |= difference(scores, other) | {"table_against": _tabled(task, other.played, None)}
    if task.pass_reward is not None:
        facts["measures"] = measures(scores.rewards, task.pass_reward, samples)
        if other is not None:
            facts["measures_against"] = measures(other.rewards, task.pass_reward, samples)
        if samples < task.metric.k:
            facts["to_report_it"] = f"{task.metric} needs eval.samples = {task.metric.k}, got {samples}"
    return facts


def _tabled(task: Task, played: Sequence[Played], against: Sequence[Played] | None) -> list[dict[str, Any]]:
    """The task's table; none where its own code cannot make it, which costs no score that was found."""
    from echo2.data import given

    try:
        return given.table(task, played, against)
    except TaskFault as fault:
        note(f"echo2: {fault}")
        return []


async def _score(config: Config, tasks: list[tuple[Task, float]], by_task: dict[str, Scores], folder: Path) -> None:
    """Install the model as version 0 of nothing and let the production episode code talk to it."""
    from echo2.cli.installed import installed_engine
    from echo2.data.cursor import held_out_prompts

    by_name = {task.name: task for task, _ in tasks}
    prompts = held_out_prompts(tasks, config.eval.prompts)
    ready = await installed_engine(config, folder, config.learning.threads)
    engine, chat = ready.engine, ready.chat
    try:
        found = await _each(
            [_score_prompt(config, engine, chat, by_name[p.task], number, p) for number, p in enumerate(prompts)]
        )
    finally:
        await engine.close()
    for prompt, scores in zip(prompts, found, strict=True):
        by_task[prompt.task].add(scores)


async def _each(work: Sequence[Coroutine[None, None, Scores]]) -> list[Scores]:
    """All of it, ``TOGETHER`` at a time, in its order; a slow one holds up no other."""
    places = asyncio.Semaphore(TOGETHER)
    done = 0

    async def placed(one: Coroutine[None, None, Scores]) -> Scores:
        nonlocal done
        async with places:
            scores = await one
        done += 1
        if done % TOGETHER == 0 or done == len(work):
            note(f"{done} of {len(work)} prompts scored")
        return scores

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(placed(one)) for one in work]
    return [task.result() for task in tasks]


async def _score_prompt(
    config: Config, engine: Engine, chat: ChatFormat, task: Task, number: int, prompt: Prompt
) -> Scores:
    """One prompt's replies, by the code that workers run."""
    from echo2.rollout.apart import judged_apart
    from echo2.rollout.episode import run_group
    from echo2.shell import SystemClock
    from echo2.transport.messages import LeaseGrant
    from echo2.types import Policy, Sampling, Trajectory

    rollout = config.rollout
    sampling = Sampling(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        max_new_tokens=rollout.max_new_tokens,
        seed=config.run.seed + number,
        stop_token_ids=chat.stop_token_ids,
    )
    lease = LeaseGrant(
        lease_id=f"eval-{number}",
        group_id=number,
        attempt=0,
        prompt=prompt,
        indices=tuple(range(config.eval.samples)),
        sampling=sampling,
        policy=Policy(0, 0),
        timeout_s=rollout.episode_timeout_s,
        purpose="eval",
    )
    scores = Scores()
    for row in await run_group(engine, task, chat, lease, rollout.thinking, SystemClock(), judged_apart):
        if row.status.is_failure:
            scores.failed += 1
            scores.faults.setdefault(prompt.prompt_id, row.error or row.status.value)
            continue
        record = msgspec.msgpack.decode(row.record, type=Trajectory)
        scores.rewards.setdefault(prompt.prompt_id, []).append(record.reward)
        scores.played.append((prompt, record.reward, record.omega))
        status = str(record.omega.get("status", "scored"))
        scores.statuses[status] = scores.statuses.get(status, 0) + 1
    return scores


def _evaluated(config: Config) -> str:
    """What the figures are of: an endpoint's own model, whatever the run's is."""
    if config.rollout.engine == "openai":
        return f"{config.server.model or 'the only model'} at {config.server.url}"
    return config.model.path or f"engine {config.rollout.engine}"

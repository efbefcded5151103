"""``echo2 eval``: the tasks' own metrics of a model, on held-out prompts, without a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from echo2.cli.output import JsonFlag, SetOption, note, print_json
from echo2.data.attempts import interval, measures

if TYPE_CHECKING:
    from echo2.config.root import Config
    from echo2.data.chat import ChatFormat
    from echo2.data.task import Played, Task
    from echo2.rollout.engine import Engine
    from echo2.types import Prompt

TOGETHER = 16
"""Prompts given to the engine at the same time."""


class Scores(msgspec.Struct):
    rewards: dict[str, list[float]] = {}
    """Rewards of the finished replies of each prompt."""
    statuses: dict[str, int] = {}
    failed: int = 0
    """Replies that could not be had or scored; not zeros."""
    played: list[Played] = []
    """The finished episodes."""

    def add(self, more: Scores) -> None:
        """Those of further prompts."""
        self.rewards |= more.rewards
        self.failed += more.failed
        self.played += more.played
        for status, count in more.statuses.items():
            self.statuses[status] = self.statuses.get(status, 0) + count


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Configuration file or run folder.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="Model directory or hub id; the run's model by default."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", metavar="PATH", help="Another model: tell the difference on the same prompts."),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Score a model on held-out prompts: mean reward, avg@k and pass@k with 95 % intervals; of games, a table."""
    from echo2.cli.inputs import checked_config

    chosen = list(overrides or []) + ([f"model.path={model}"] if model else [])
    config = checked_config(run, chosen)
    other = None if against is None else checked_config(run, [*(overrides or []), f"model.path={against}"])
    facts = compared(config, other)
    print_json(facts) if as_json else print(_text(facts))


def compared(config: Config, other: Config | None = None) -> dict[str, Any]:
    """What the model of ``config`` scores and, where another is given, what it has more on the same prompts."""
    tasks = loaded(config)
    by_task = scored(config, tasks)
    # Tasks anew: an opponent that is a model belongs to the event loop in which it was first asked.
    others = None if other is None else scored(other, loaded(other))
    reports = {
        task.name: report(task, by_task[task.name], config.eval.samples, others[task.name] if others else None)
        for task, _ in tasks
    }
    name = config.model.path or f"engine {config.rollout.engine}"
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
    facts["table"] = task.table(scores.played, None if other is None else other.played)
    if other is not None:
        facts |= difference(scores, other) | {"table_against": task.table(other.played)}
    if task.pass_reward is not None:
        facts["measures"] = measures(scores.rewards, task.pass_reward, samples)
        if other is not None:
            facts["measures_against"] = measures(other.rewards, task.pass_reward, samples)
        if samples < task.metric.k:
            facts["to_report_it"] = f"{task.metric} needs eval.samples = {task.metric.k}, got {samples}"
    return facts


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
            continue
        record = msgspec.msgpack.decode(row.record, type=Trajectory)
        scores.rewards.setdefault(prompt.prompt_id, []).append(record.reward)
        scores.played.append((prompt, record.reward, record.omega))
        status = str(record.omega.get("status", "scored"))
        scores.statuses[status] = scores.statuses.get(status, 0) + 1
    return scores


def _text(facts: dict[str, Any]) -> str:
    mean, bounds = facts["reward_mean"], facts["reward_ci95"]
    if mean is None:
        return f"{facts['model']}: no reply could be scored, {facts['failed']} failed"
    spread = f" (95 % interval {bounds[0]:.3f} to {bounds[1]:.3f})" if bounds else ""
    counts = ", ".join(f"{name} {count}" for name, count in facts["statuses"].items())
    head = (
        f"{facts['model']}: mean reward {mean:.3f}{spread} over {facts['prompts']} held-out prompts, "
        f"{facts['replies']} replies ({counts}), {facts['failed']} failed"
    )
    lines = [head]
    several = len(facts["by_task"]) > 1
    if facts.get("reward_more") is not None:
        bounds = facts["reward_more_ci95"]
        spread = f" (95 % interval {bounds[0]:+.3f} to {bounds[1]:+.3f})" if bounds else ""
        lines.append(f"against {facts['against']}, on the same prompts: {facts['reward_more']:+.3f}{spread}")
    for name, of_task in facts["by_task"].items():
        if several or not of_task["table"]:
            lines.append(_line(name, of_task, several))
        lines += _table(of_task["table"]) if of_task["table"] else []
    return "\n".join(lines)


def _line(name: str, facts: dict[str, Any], several: bool) -> str:
    """several: beside others, whose mean stands in the line above."""
    measured = [
        f"{metric} {found['value']:.3f}" + (" ({:.3f} to {:.3f})".format(*found["ci95"]) if found["ci95"] else "")
        for metric, found in facts.get("measures", {}).items()
        if found["value"] is not None
    ]
    parts = [", ".join(measured) or "no pass or fail in this task"]
    if several and facts["reward_mean"] is not None:
        told = ", ".join(measured) or f"mean reward {facts['reward_mean']:.3f}"
        parts = [f"{told} over {facts['prompts']} prompts"]
    if several and facts["failed"]:
        parts.append(f"{facts['failed']} replies failed")
    if facts["excluded_rows"]:
        parts.append(f"{facts['excluded_rows']} rows left out")
    if "to_report_it" in facts:
        parts.append(facts["to_report_it"])
    return f"{name}: {'; '.join(parts)}"


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table, a column for each key."""
    columns = list(rows[0])
    cells = [columns, *([_cell(row[column]) for column in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return " to ".join(map(_cell, value)) if isinstance(value, tuple) else str(value)

"""``echo2 eval``: the tasks' own metrics of a model, on held-out prompts, without a run."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Configuration file or run folder.")],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="PATH", help="Model directory or hub id; the run's model by default."),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Score a model on held-out prompts: mean reward, avg@k and pass@k with 95 % intervals; of games, a table."""
    from echo2.cli.inputs import checked_config
    from echo2.data.registry import load_task

    chosen = list(overrides or []) + ([f"model.path={model}"] if model else [])
    config = checked_config(run, chosen)
    tasks = [(load_task(section), section.weight) for section in config.tasks]
    by_task = {task.name: Scores() for task, _ in tasks}
    with tempfile.TemporaryDirectory(prefix="echo2-eval-") as folder:
        asyncio.run(_score(config, tasks, by_task, Path(folder)))
    name = config.model.path or f"engine {config.rollout.engine}"
    reports = {task.name: report(task, by_task[task.name], config.eval.samples) for task, _ in tasks}
    facts = {"model": name, "tasks": list(reports), **summarise(merged(list(by_task.values()))), "by_task": reports}
    print_json(facts) if as_json else print(_text(facts))


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
        whole.rewards |= part.rewards
        whole.failed += part.failed
        for status, count in part.statuses.items():
            whole.statuses[status] = whole.statuses.get(status, 0) + count
    return whole


def report(task: Task, scores: Scores, samples: int) -> dict[str, Any]:
    """One task's figures: the metric it is known by, and whether ``samples`` replies a prompt give it."""
    facts = summarise(scores) | {"metric": str(task.metric), "excluded_rows": len(getattr(task, "excluded", []))}
    facts["table"] = task.table(scores.played)
    if task.pass_reward is not None:
        facts["measures"] = measures(scores.rewards, task.pass_reward, samples)
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
        for start in range(0, len(prompts), TOGETHER):
            async with asyncio.TaskGroup() as group:
                for number, prompt in enumerate(prompts[start : start + TOGETHER], start):
                    task = by_name[prompt.task]
                    scores = by_task[task.name]
                    group.create_task(_score_prompt(config, engine, chat, task, number, prompt, scores))
            note(f"{min(start + TOGETHER, len(prompts))} of {len(prompts)} prompts scored")
    finally:
        await engine.close()


async def _score_prompt(
    config: Config, engine: Engine, chat: ChatFormat, task: Task, number: int, prompt: Prompt, scores: Scores
) -> None:
    """One prompt's replies into ``scores``, by the code that workers run."""
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
    for row in await run_group(engine, task, chat, lease, rollout.thinking, SystemClock(), judged_apart):
        if row.status.is_failure:
            scores.failed += 1
            continue
        record = msgspec.msgpack.decode(row.record, type=Trajectory)
        scores.rewards.setdefault(prompt.prompt_id, []).append(record.reward)
        scores.played.append((prompt, record.reward, record.omega))
        status = str(record.omega.get("status", "scored"))
        scores.statuses[status] = scores.statuses.get(status, 0) + 1


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
    for name, of_task in facts["by_task"].items():
        lines += _table(of_task["table"]) if of_task["table"] else [_line(name, of_task)]
    return "\n".join(lines)


def _line(name: str, facts: dict[str, Any]) -> str:
    measured = [
        f"{metric} {found['value']:.3f}" + (" ({:.3f} to {:.3f})".format(*found["ci95"]) if found["ci95"] else "")
        for metric, found in facts.get("measures", {}).items()
        if found["value"] is not None
    ]
    parts = [", ".join(measured) or "no pass or fail in this task"]
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

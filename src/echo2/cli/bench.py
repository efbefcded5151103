"""``echo2 bench engine``: what this machine would deliver as a worker, before it joins anything."""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from echo2.cli.output import JsonFlag, SetOption, aside, note, print_json

if TYPE_CHECKING:
    from echo2.cli.installed import Installed
    from echo2.config.root import Config
    from echo2.data.task import Task

app = typer.Typer(help="Measure this machine.", no_args_is_help=False)


class Delivered(msgspec.Struct):
    groups: int = 0
    trajectories: int = 0
    failed: int = 0
    sampled_tokens: int = 0
    error: str = ""
    """Why the first failed row failed."""


@app.callback()
def bench() -> None:
    """Measure this machine."""


@app.command("engine")
def engine(
    run: Annotated[Path, typer.Argument(metavar="RUN.toml", help="Configuration file or run folder.")],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="Begin new groups for so long; those under way are finished.")
    ] = 30.0,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu, cuda or cuda:N instead of what the configuration says.")
    ] = None,
    threads: Annotated[
        int, typer.Option("--threads", min=0, help="CPU threads; 0 takes all cores that this process may use.")
    ] = 0,
    overrides: SetOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Trajectories and tokens per second of the run's engine on its own prompts, and the time to install a snapshot.

    The rate is this machine's mu for ``echo2 plan``: a worker with the same configuration delivers as much while it
    waits for nobody.
    """
    from echo2.cli.inputs import checked_config
    from echo2.cores import own_threads
    from echo2.data.registry import load_task

    chosen = list(overrides or []) + ([f"workers.device={device}"] if device else [])
    with aside(), tempfile.TemporaryDirectory(prefix="echo2-bench-") as folder:
        config = checked_config(run, chosen)
        tasks = [(load_task(section), section.weight) for section in config.tasks]
        facts = asyncio.run(_measure(config, tasks, Path(folder), seconds, threads or own_threads()))
    print_json(facts) if as_json else print(_text(facts))


async def _measure(
    config: Config, tasks: list[tuple[Task, float]], folder: Path, seconds: float, threads: int
) -> dict[str, Any]:
    from echo2.cli.installed import installed_engine

    ready = await installed_engine(config, folder, threads)
    try:
        note(f"installed in {ready.load_s + ready.switch_s:.2f} s; generating for {seconds:g} s")
        await _lanes(config, tasks, ready, 1, 0.0)  # what is made at first use is not counted
        began_s = time.monotonic()
        delivered = await _lanes(config, tasks, ready, config.rollout.concurrent_groups, began_s + seconds)
        took_s = time.monotonic() - began_s
    finally:
        await ready.engine.close()
    return {
        "engine": config.rollout.engine,
        "model": config.model.path,
        "device": config.workers.device,
        "threads": threads,
        "concurrent_groups": config.rollout.concurrent_groups,
        "group_size": config.rollout.group_size,
        "trajectories_per_s": delivered.trajectories / took_s,
        "tokens_per_s": delivered.sampled_tokens / took_s,
        "tokens_mean": delivered.sampled_tokens / delivered.trajectories if delivered.trajectories else None,
        "trajectories": delivered.trajectories,
        "failed": delivered.failed,
        "error": delivered.error,
        "seconds": took_s,
        "load_s": ready.load_s,
        "switch_s": ready.switch_s,
    }


async def _lanes(
    config: Config, tasks: list[tuple[Task, float]], ready: Installed, lanes: int, until_s: float
) -> Delivered:
    """Groups of the run's training prompts, ``lanes`` at a time, until the time is over; at least one each."""
    from echo2.data.cursor import PromptCursor

    cursor, delivered = PromptCursor(tasks, config.run.seed), Delivered()
    by_name = {task.name: task for task, _ in tasks}

    async def lane() -> None:
        while True:
            number = delivered.groups
            delivered.groups += 1
            prompt = cursor.prompt(number)
            await _group(config, by_name[prompt.task], ready, number, prompt, delivered)
            if time.monotonic() >= until_s:
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(lanes):
            group.create_task(lane())
    return delivered


async def _group(config: Config, task: Task, ready: Installed, number: int, prompt: Any, delivered: Delivered) -> None:
    """One lease's work, by the code that workers run."""
    from echo2.rollout.apart import judged_apart
    from echo2.rollout.episode import run_group
    from echo2.shell import SystemClock
    from echo2.transport.messages import LeaseGrant
    from echo2.types import Policy, Sampling, Trajectory

    rollout = config.rollout
    sampling = Sampling(rollout.temperature, rollout.top_p, rollout.max_new_tokens, config.run.seed + number)
    lease = LeaseGrant(
        lease_id=f"bench-{number}",
        group_id=number,
        attempt=0,
        prompt=prompt,
        indices=tuple(range(rollout.group_size)),
        sampling=sampling,
        policy=Policy(0, 0),
        timeout_s=rollout.episode_timeout_s,
        purpose="train",
    )
    for row in await run_group(ready.engine, task, ready.chat, lease, rollout.thinking, SystemClock(), judged_apart):
        if row.status.is_failure:
            delivered.failed += 1
            delivered.error = delivered.error or f"{prompt.prompt_id}: {row.error}"
            continue
        record = msgspec.msgpack.decode(row.record, type=Trajectory)
        delivered.trajectories += 1
        delivered.sampled_tokens += sum(len(part.token_ids) // 4 for part in record.segments if part.sampled)


def _text(facts: dict[str, Any]) -> str:
    name = facts["model"] or f"engine {facts['engine']}"
    lines = [
        f"{name}: {facts['trajectories_per_s']:.3g} trajectories/s, {facts['tokens_per_s']:.4g} tokens/s"
        f" ({facts['trajectories']} trajectories in {facts['seconds']:.1f} s,"
        f" {facts['concurrent_groups']} groups of {facts['group_size']} at a time)",
        f"install: {facts['load_s']:.2f} s aside while serving, {facts['switch_s']:.2f} s of pause",
    ]
    if facts["failed"]:
        lines.append(f"{facts['failed']} trajectories failed: {facts['error']}")
    return "\n".join(lines)

"""What a configuration would run, in numbers, without running it.

Invariant: everything here follows from the configuration alone; no network, device or model is touched.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo2.config.render import config_digest
from echo2.config.root import Config


def preview(config: Config) -> dict[str, Any]:
    """The quantities of DESIGN's symbol table that are known before a run starts."""
    rollout, learning = config.rollout, config.learning
    return {
        "run": config.run.name,
        "run_folder": str(Path(config.run.dir) / config.run.name),
        "mode": config.run.mode,
        "steps": config.run.steps,
        "model": config.model.path,
        "engine": rollout.engine,
        "tasks": [task.called for task in config.tasks],
        "staleness_budget": config.staleness_budget,
        "publish_period": config.publish_period,
        "rollouts_per_step": rollout.rollouts_per_step,
        "prompts_per_step": config.prompts_per_step,
        "group_size": rollout.group_size,
        "updates_per_step": learning.updates_per_step,
        "publishes": config.run.steps // config.publish_period + 1,
        "trajectories": config.run.steps * rollout.rollouts_per_step,
        "max_new_tokens": rollout.max_new_tokens,
        "temperature": rollout.temperature,
        "top_p": rollout.top_p,
        "thinking": rollout.thinking,
        "objective": learning.objective,
        "lr": learning.lr,
        "local_workers": config.workers.local,
        "shared_device": config.workers.shared_device,
        "pools": [pool.kind for pool in config.pools],
        "usd_per_h": config.provisioning.learner_usd_per_h + config.workers.local * config.workers.usd_per_h,
        "config_digest": config_digest(config),
    }


def preview_text(plan: Mapping[str, Any]) -> str:
    """The same for people; symbols stand beside the words they abbreviate."""
    rows = [
        ("run", f"{plan['run']} in {plan['run_folder']}, mode {plan['mode']}, {plan['steps']} steps"),
        ("model", f"{plan['model'] or '(none)'}, engine {plan['engine']}"),
        ("tasks", ", ".join(plan["tasks"])),
        (
            "staleness",
            f"S = {plan['staleness_budget']}, kappa = {plan['publish_period']}, {plan['publishes']} publishes",
        ),
        (
            "step",
            f"R = {plan['rollouts_per_step']} trajectories = P = {plan['prompts_per_step']} prompts "
            f"x n = {plan['group_size']}, {plan['updates_per_step']} updates",
        ),
        (
            "sampling",
            f"{plan['max_new_tokens']} new tokens, temperature {plan['temperature']:g}, top-p {plan['top_p']:g}, "
            f"thinking {'on' if plan['thinking'] else 'off'}",
        ),
        ("learning", f"{plan['objective']}, learning rate {plan['lr']:g}"),
        ("workers", _workers(plan)),
        ("total", f"{plan['trajectories']} trajectories"),
    ]
    return "\n".join(f"{name:<10} {text}" for name, text in rows)


def _workers(plan: Mapping[str, Any]) -> str:
    who = "the learner's own device, in turns" if plan["shared_device"] else f"{plan['local_workers']} local"
    cost = f"{who}, {plan['usd_per_h']:g} USD/h with the learner"
    pools = plan["pools"]
    return f"{cost} and without the pool{'s' * (len(pools) > 1)} ({', '.join(pools)})" if pools else cost

"""Relations between keys, checked in one place, before any network, file or device is touched.

Invariant: a fault names every key it involves, puts the numbers into the relation that fails and gives the nearest
values that satisfy it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from echo2.config.objectives import CHOOSABLE, OBJECTIVE_KEYS

if TYPE_CHECKING:
    from echo2.config.root import Config

SMALLEST_ECHO2_BUDGET = 3
"""2 <= kappa <= S - 1 leaves no kappa below S = 3."""


class Fault(NamedTuple):
    keys: tuple[str, ...]
    """Dotted keys whose values the sentence blames."""
    sentence: str


def infeasibilities(config: Config) -> list[Fault]:
    """Every relation that ``config`` breaks; empty when it is feasible. Pure."""
    return [fault for check in _CHECKS for fault in check(config)]


def _groups(config: Config) -> Iterator[Fault]:
    rows, group = config.rollout.rollouts_per_step, config.rollout.group_size
    if rows % group:
        below, above = rows - rows % group, rows - rows % group + group
        nearest = f"{below} or {above}" if below else f"{above}"
        yield Fault(
            ("rollout.rollouts_per_step", "rollout.group_size"),
            f"rollout.rollouts_per_step must be a multiple of rollout.group_size, because it counts trajectories "
            f"(prompts x group_size), not prompts: got {rows} trajectories in groups of {group}; "
            f"set rollout.rollouts_per_step to {nearest}",
        )


def _updates(config: Config) -> Iterator[Fault]:
    rows, group = config.rollout.rollouts_per_step, config.rollout.group_size
    updates = config.learning.updates_per_step
    prompts = rows // group
    if rows % group == 0 and prompts < updates:
        yield Fault(
            ("rollout.rollouts_per_step", "rollout.group_size", "learning.updates_per_step"),
            f"learning.updates_per_step must be at most the prompts of a step, because each update takes whole groups: "
            f"got {updates} updates with {rows} / {group} = {prompts} prompts; "
            f"set learning.updates_per_step to {prompts} or rollout.rollouts_per_step to {updates * group}",
        )


def _staleness(config: Config) -> Iterator[Fault]:
    """2 <= kappa <= S - 1 in mode echo2; versions count training steps, however many updates a step holds."""
    if config.run.mode != "echo2":
        return
    budget, period = config.staleness.budget, config.staleness.publish_period
    if budget < SMALLEST_ECHO2_BUDGET:
        kappa = f" with kappa = {period}" if period else ""
        yield Fault(
            ("staleness.budget", "run.mode"),
            f"staleness.budget (S) must be at least {SMALLEST_ECHO2_BUDGET} in mode echo2, because "
            f"2 <= kappa <= S - 1 has no solution below it: got S = {budget}{kappa}; set staleness.budget to "
            f'{SMALLEST_ECHO2_BUDGET}, or run.mode to "async" (S = 1) or "sync" (S = 0)',
        )
    elif period and not 2 <= period <= budget - 1:
        nearest = min(max(period, 2), budget - 1)
        advice = f"set staleness.publish_period to {nearest}"
        if period >= budget:
            advice += f" or staleness.budget to {period + 1}"
        yield Fault(
            ("staleness.publish_period", "staleness.budget", "run.mode"),
            f"staleness.publish_period (kappa) must satisfy 2 <= kappa <= S - 1 in mode echo2: got kappa = {period} "
            f"with S = {budget}, and 2 <= {period} <= {budget - 1} is false; {advice}",
        )


def _optimizer(config: Config) -> Iterator[Fault]:
    betas = config.learning.betas
    if not all(0 <= beta < 1 for beta in betas):
        yield Fault(
            ("learning.betas",),
            f"learning.betas must be two numbers in [0, 1), got {list(betas)}; the usual pair is [0.9, 0.999]",
        )


def _objective(config: Config) -> Iterator[Fault]:
    learning = config.learning
    read = OBJECTIVE_KEYS[learning.objective]
    ignored = [key for key in CHOOSABLE if getattr(learning, key) is not None and key not in read]
    if ignored:
        names = ", ".join(f"learning.{key}" for key in ignored)
        readers = [name for name, keys in OBJECTIVE_KEYS.items() if set(ignored) <= keys.keys()]
        instead = f", or set learning.objective to {' or '.join(readers)}" if readers else ""
        yield Fault(
            (*(f"learning.{key}" for key in ignored), "learning.objective"),
            f'{names} must be left out with learning.objective = "{learning.objective}", which does not read '
            f"{'it' if len(ignored) == 1 else 'them'}: remove {'it' if len(ignored) == 1 else 'them'}{instead}",
        )


def _tasks(config: Config) -> Iterator[Fault]:
    if not config.tasks:
        yield Fault(("tasks",), "tasks must name at least one task, got none; add a [[tasks]] table with a name")
    counts = Counter(task.called for task in config.tasks)
    for name, count in counts.items():
        if count > 1:
            yield Fault(
                ("tasks",),
                f'every [[tasks]] must be called something else, got "{name}" {count} times; give each a label',
            )


def _times(config: Config) -> Iterator[Fault]:
    part, rollout = config.coordinator, config.rollout
    if part.dead_after_s <= part.heartbeat_s:
        yield Fault(
            ("coordinator.dead_after_s", "coordinator.heartbeat_s"),
            f"coordinator.dead_after_s must be longer than coordinator.heartbeat_s, or every worker counts as gone "
            f"between two heartbeats: got {part.dead_after_s:g} s with {part.heartbeat_s:g} s; "
            f"set coordinator.dead_after_s to {10 * part.heartbeat_s:g} or more",
        )
    if rollout.episode_timeout_s > part.lease_max_s:
        yield Fault(
            ("rollout.episode_timeout_s", "coordinator.lease_max_s"),
            f"rollout.episode_timeout_s must be at most coordinator.lease_max_s, the longest life of the lease it runs "
            f"under: got {rollout.episode_timeout_s:g} s with {part.lease_max_s:g} s; "
            f"set coordinator.lease_max_s to {rollout.episode_timeout_s:g} or more",
        )


def _ports(config: Config) -> Iterator[Fault]:
    port = config.coordinator.port
    if port and port == config.broadcast.relay_port:
        yield Fault(
            ("coordinator.port", "broadcast.relay_port"),
            f"broadcast.relay_port must differ from coordinator.port, because both are listened on: got {port} twice; "
            f"set broadcast.relay_port to {port + 1 if port < 65535 else port - 1}, or to 0 for any free one",
        )


def _pools(config: Config) -> Iterator[Fault]:
    kinds = Counter(pool.kind for pool in config.pools)
    for kind, count in kinds.items():
        if count > 1:
            yield Fault(("pools",), f"every [[pools]] kind must be there once, got {kind} {count} times; merge them")
    if config.pools and config.run.mode != "echo2":
        yield Fault(
            ("pools", "run.mode"),
            f'[[pools]] need run.mode = "echo2", because capacity is planned by its overlap: got "{config.run.mode}"; '
            "remove the pools, or set run.mode",
        )


def _prices(config: Config) -> Iterator[Fault]:
    gamma = config.provisioning.gamma
    if not math.isfinite(gamma):
        yield Fault(("provisioning.gamma",), f"provisioning.gamma must be a finite number, got {gamma}; use 1.1")


def _lora(config: Config) -> Iterator[Fault]:
    if config.lora.rank and not config.lora.targets:
        yield Fault(
            ("lora.rank", "lora.targets"),
            f"lora.targets must name at least one layer while lora.rank is {config.lora.rank}: got none; set it to "
            f'["all-linear"], or lora.rank to 0',
        )


def _ranks(config: Config) -> Iterator[Fault]:
    if config.learning.learner == "scripted" and config.learning.ranks > 1:
        yield Fault(
            ("learning.ranks", "learning.learner"),
            f'learning.ranks must be 1 with learning.learner = "scripted", which computes nothing to share: got'
            f" {config.learning.ranks}; set learning.ranks to 1",
        )


def _rehearsal(config: Config) -> Iterator[Fault]:
    learner, engine = config.learning.learner, config.rollout.engine
    if learner == "scripted" and engine != "scripted":
        yield Fault(
            ("learning.learner", "rollout.engine"),
            f'learning.learner = "scripted" needs rollout.engine = "scripted", because its snapshots are of no model: '
            f'got engine "{engine}"; set both, or neither',
        )


def _shared(config: Config) -> Iterator[Fault]:
    """What one set of weights on one device cannot be."""
    if not config.workers.shared_device:
        return
    learning, rollout, model = config.learning, config.rollout, config.model
    wanted: tuple[tuple[str, object, bool, object, str], ...] = (
        ("rollout.engine", rollout.engine, rollout.engine == "transformers", "transformers",
         "the only engine that runs in the learner's process"),
        ("learning.learner", learning.learner, learning.learner == "torch", "torch", "which has weights to share"),
        ("learning.ranks", learning.ranks, learning.ranks == 1, 1, "because ranks split the weights"),
        ("model.snapshot_dtype", model.snapshot_dtype, model.snapshot_dtype == "float32", "float32",
         "because the engine runs the learner's own weights, and a version that is published rounded would be another "
         "policy of the same name"),
        ("learning.compute_dtype", learning.compute_dtype, learning.compute_dtype != "float64", "float32",
         "because snapshots cannot hold float64"),
        ("lora.rank", config.lora.rank, config.lora.rank == 0, 0,
         "because the engine would generate without the adapters beside those weights"),
        ("workers.local", config.workers.local, config.workers.local == 0, 0,
         "because each of those would load weights of its own onto the same machine"),
    )  # fmt: skip
    for key, value, holds, value_that_does, why in wanted:
        if not holds:
            yield Fault(
                (key, "workers.shared_device"),
                f"{key} must be {_quoted(value_that_does)} with workers.shared_device, {why}: got {_quoted(value)}; "
                f"set {key} to {_quoted(value_that_does)}, or workers.shared_device to false",
            )


def _quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _server(config: Config) -> Iterator[Fault]:
    server, engine = config.server, config.rollout.engine
    if server.url and not server.url.startswith(("http://", "https://")):
        yield Fault(("server.url",), f"server.url must begin with http:// or https://, got {server.url!r}")
    if server.url and (server.command or server.arguments):
        yield Fault(
            ("server.url", "server.command", "server.arguments"),
            "server.command and server.arguments are for a server that the worker starts, and server.url names one "
            "that runs already: give one or the other",
        )
    if engine == "openai" and not server.url:
        yield Fault(
            ("rollout.engine", "server.url"),
            'rollout.engine = "openai" needs server.url, up to and including /v1, and server.model',
        )


_CHECKS: tuple[Callable[[Config], Iterator[Fault]], ...] = (
    _groups,
    _updates,
    _staleness,
    _optimizer,
    _objective,
    _tasks,
    _times,
    _ports,
    _prices,
    _pools,
    _ranks,
    _lora,
    _rehearsal,
    _shared,
    _server,
)

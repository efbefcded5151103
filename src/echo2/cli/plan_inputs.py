"""From flags, a configuration or a run's folder to the question that ``echo2 plan`` answers.

Invariant: a flag beats what was measured, and that beats the configuration; each number's origin is told. What is
missing is told in one sentence, with the flags that would give it.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from echo2.config.load import load_config
from echo2.config.root import Config
from echo2.errors import UserError
from echo2.provisioning.demand import Demand, Rule, Times
from echo2.provisioning.measured import Measured, measured
from echo2.provisioning.offers import BYTES_PER_GB
from echo2.provisioning.question import Afford, Ask, Kappa, Market, Policy, Question, Rent, Use

BYTES_PER_GIB = 2**30
BITS_PER_MBIT = 1e6
BITS_PER_MB = 8e6
DEFAULT_GAMMA = 1.1


class Flags(msgspec.Struct, frozen=True, kw_only=True):
    """What was given on the command line; None where nothing was."""

    t_train_s: float | None
    t_bcast_s: float | None
    t_gen_s: float | None
    rollouts_per_step: int | None
    snapshot_gb: float | None
    snapshot_gib: float | None
    worker_mbps: float | None
    worker_mb_per_s: float | None
    staleness_budget: int | None
    publish_period: str | None
    gamma: float | None
    rule: Rule
    offers: str | None
    spot: bool
    policy: Policy | None
    learner_usd_per_h: float | None
    rental_h: float | None
    budget_usd_per_h: float | None
    pool_rate_per_s: float | None
    use_all: bool
    parameters: float | None
    kv_bytes_per_token: float | None
    prompt_tokens: float | None
    reply_tokens: float | None
    group_size: int | None
    efficiency: float | None
    machines: int | None
    measured: tuple[tuple[str, float | None], ...]


class Source(msgspec.Struct, frozen=True):
    """What the positional argument named."""

    config: Config | None = None
    measured: Measured = Measured()
    folder: str = ""


class Inputs(msgspec.Struct, frozen=True, kw_only=True):
    ask: Ask
    market: Market
    question: Question
    learner_usd_per_h: float
    origins: dict[str, str]
    """Where T_train, T_bcast and T_gen come from."""
    notes: tuple[str, ...]


def read_source(path: Path | None) -> Source:
    """A configuration file, or a run's folder with what it measured. Raises UserError."""
    if path is None:
        return Source()
    try:
        is_folder = path.is_dir()
    except OSError as error:  # a name too long, a folder on the way that may not be looked into
        raise UserError(f"a plan must be for a configuration or a run's folder, but {error.strerror}: {path}") from None
    if not is_folder:
        return Source(load_config(path, check_places=False))
    from echo2.report.folder import read_run
    from echo2.run.folder import RunFolder

    config = RunFolder(path.absolute()).load()
    run = read_run(path)
    return Source(config, measured(run.metrics, run.events), run.name)


def gather(flags: Flags, source: Source) -> Inputs:
    """Everything that a plan needs. Raises UserError with what is missing."""
    from echo2.cli.plan_offers import read_market

    _check_flags(flags)
    bytes_per_publish = _bytes_per_publish(flags, source)
    times, origins = _times(flags, source, bytes_per_publish)
    question = _question(flags)
    config = source.config
    gamma = flags.gamma or (config.provisioning.gamma if config else DEFAULT_GAMMA)
    ask = _ask(flags, source, Demand(times=times, rule=flags.rule, gamma=gamma), question)
    learner = flags.learner_usd_per_h or (config.provisioning.learner_usd_per_h if config else 0.0)
    if isinstance(question, Afford):
        question = _without_learner(question, learner)
    offers, notes = ((), ()) if isinstance(question, Use) and question.mu_per_s else read_market(flags, source)
    market = Market(offers=offers, bytes_per_publish=bytes_per_publish or 0.0, rental_h=flags.rental_h or math.inf)
    if not bytes_per_publish and any(offer.traffic_usd_per_gb for offer in offers):
        notes = (*notes, "traffic is left out of the cost: give --snapshot-gb, what a publish sends to each worker")
    if "t_gen_s" not in origins:
        notes = (*notes, "T_gen is not known and taken as 0: give --t-gen for bubbles that include it")
    return Inputs(ask=ask, market=market, question=question, learner_usd_per_h=learner, origins=origins, notes=notes)


def _check_flags(flags: Flags) -> None:
    sizes, speeds = (flags.snapshot_gb, flags.snapshot_gib), (flags.worker_mbps, flags.worker_mb_per_s)
    if None not in sizes:
        raise UserError("the size of a snapshot must be given once: --snapshot-gb or --snapshot-gib, not both")
    if None not in speeds:
        raise UserError("a worker's line must be given once: --worker-mbps or --worker-mb-per-s, not both")
    if flags.t_bcast_s is not None and speeds != (None, None):
        raise UserError("T_bcast must be given once: --t-bcast, or --worker-mbps with the size to compute it from")
    asked = (flags.budget_usd_per_h is not None, flags.pool_rate_per_s is not None, flags.use_all)
    if sum(asked) > 1:
        raise UserError("one question must be asked at a time: --budget-usd-per-h, --pool-rate or --use-all")
    if any(asked) and flags.policy is not None:
        raise UserError("--policy must be left out with --budget-usd-per-h, --pool-rate and --use-all: it rents anew")
    if flags.pool_rate_per_s is not None and flags.offers is not None:
        raise UserError("--pool-rate must be given without --offers; --use-all takes the offers' rate")


def _bytes_per_publish(flags: Flags, source: Source) -> float | None:
    if flags.snapshot_gb is not None:
        return round(flags.snapshot_gb * BYTES_PER_GB)
    if flags.snapshot_gib is not None:
        return round(flags.snapshot_gib * BYTES_PER_GIB)
    return source.measured.bytes_per_publish


def _times(flags: Flags, source: Source, bytes_per_publish: float | None) -> tuple[Times, dict[str, str]]:
    ran, config = source.measured, source.config
    computed = _t_bcast_s(flags, bytes_per_publish)
    origins: dict[str, str] = {}

    def first(name: str, *choices: tuple[float | None, str]) -> float | None:
        for value, origin in choices:
            if value is not None:
                origins[name] = origin
                return value
        return None

    measured_in = f"measured in {source.folder}"
    t_train_s = first("t_train_s", (flags.t_train_s, "given"), (ran.t_train_s, f"{measured_in}, median of 5 steps"))
    t_bcast_s = first(
        "t_bcast_s", (flags.t_bcast_s, "given"), (computed, "size over line rate"), (ran.t_bcast_s, measured_in)
    )
    t_gen_s = first("t_gen_s", (flags.t_gen_s, "given"), (ran.t_gen_s, f"{measured_in}, lease to submission"))
    rollouts = flags.rollouts_per_step or (config.rollout.rollouts_per_step if config else None)
    if t_train_s is None or t_bcast_s is None or rollouts is None:
        t_bcast = "--t-bcast (or --snapshot-gb with --worker-mbps)"
        values = {"--t-train": t_train_s, t_bcast: t_bcast_s, "--rollouts-per-step": rollouts}
        missing = [flag for flag, value in values.items() if value is None]
        raise UserError(
            f"a plan must know the times and sizes of a step, and {', '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} missing: give {'them' if len(missing) > 1 else 'it'}, or the "
            "folder of a run that measured a few steps"
        )
    times = Times(t_train_s=t_train_s, t_bcast_s=t_bcast_s, rollouts_per_step=rollouts, t_gen_s=t_gen_s or 0.0)
    return times, origins


def _t_bcast_s(flags: Flags, bytes_per_publish: float | None) -> float | None:
    """Size over the line's rate: what a long chain of relays comes close to."""
    if flags.worker_mbps is not None:
        bits_per_s = flags.worker_mbps * BITS_PER_MBIT
    elif flags.worker_mb_per_s is not None:
        bits_per_s = flags.worker_mb_per_s * BITS_PER_MB
    else:
        return None
    if bytes_per_publish is None:
        raise UserError("--worker-mbps and --worker-mb-per-s must come with a size: give --snapshot-gb")
    return bytes_per_publish * 8 / bits_per_s


def _question(flags: Flags) -> Question:
    if flags.budget_usd_per_h is not None:
        return Afford(flags.budget_usd_per_h)
    if flags.pool_rate_per_s is not None or flags.use_all:
        return Use(flags.pool_rate_per_s)
    return Rent(flags.policy or "cheapest")


def _without_learner(question: Afford, learner_usd_per_h: float) -> Afford:
    left = question.workers_usd_per_h - learner_usd_per_h
    if left <= 0:
        raise UserError(
            f"--budget-usd-per-h must pay for the learner, too, got {question.workers_usd_per_h:g} USD/h where the "
            f"learner alone costs {learner_usd_per_h:g} USD/h: raise it"
        )
    return Afford(left)


def _ask(flags: Flags, source: Source, demand: Demand, question: Question) -> Ask:
    config = source.config
    budget = flags.staleness_budget
    period: Kappa = "auto" if isinstance(question, Use) else "default"
    if flags.publish_period is not None:
        period = "auto" if flags.publish_period == "auto" else int(flags.publish_period)
    elif config is not None and config.run.mode == "echo2" and config.staleness.publish_period:
        period = config.staleness.publish_period
    if budget is None and config is not None:
        if config.run.mode != "echo2":
            raise UserError(
                f'a plan must be for run.mode = "echo2", got "{config.run.mode}", which has no staleness to plan with: '
                "give --staleness 3 or more to see what echo2 would need"
            )
        budget = config.staleness.budget
    if budget is None and not isinstance(question, Use):
        raise UserError("a plan must know the staleness budget S, and it is missing: give --staleness, 3 or more")
    return Ask(demand=demand, staleness_budget=budget, publish_period=period)

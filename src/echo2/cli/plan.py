"""``echo2 plan``: what a run needs and what it would cost, before anything is rented."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo2.cli import plan_flags as flag
from echo2.cli.output import JsonFlag, print_json, show

if TYPE_CHECKING:
    from echo2.cli.plan_inputs import Inputs
    from echo2.provisioning.plan import Plan

LEAST_COLUMNS = 72
"""What the table of machines needs."""


def plan(
    run: Annotated[
        Path | None,
        typer.Argument(metavar="RUN", help="Configuration file, or a run's folder for what it measured."),
    ] = None,
    t_train: flag.TTrain = None,
    t_bcast: flag.TBcast = None,
    t_gen: flag.TGen = None,
    rollouts_per_step: flag.RolloutsPerStep = None,
    snapshot_gb: flag.SnapshotGb = None,
    snapshot_gib: flag.SnapshotGib = None,
    worker_mbps: flag.WorkerMbps = None,
    worker_mb_per_s: flag.WorkerMbPerS = None,
    staleness: flag.Staleness = None,
    publish_period: flag.PublishPeriod = None,
    gamma: flag.Gamma = None,
    rule: flag.RuleOption = flag.RuleName.overlapped,
    offers: flag.Offers = None,
    spot: flag.Spot = False,
    policy: flag.PolicyOption = None,
    learner_usd_per_h: flag.Learner = None,
    rental_h: flag.RentalH = None,
    budget_usd_per_h: flag.Budget = None,
    pool_rate: flag.PoolRate = None,
    use_all: flag.UseAll = False,
    parameters: flag.Parameters = None,
    kv_bytes_per_token: flag.KvBytes = None,
    prompt_tokens: flag.PromptTokens = None,
    reply_tokens: flag.ReplyTokens = None,
    group_size: flag.GroupSize = None,
    efficiency: flag.Efficiency = None,
    machines: flag.Machines = None,
    measured: flag.MeasuredRates = None,
    as_json: JsonFlag = False,
) -> None:
    """Say which workers keep the learner busy, at what cost, staleness and bubble; exit code 2 when none do."""
    from echo2.cli.plan_inputs import Flags, gather, read_source

    given = Flags(
        t_train_s=t_train, t_bcast_s=t_bcast, t_gen_s=t_gen, rollouts_per_step=rollouts_per_step,
        snapshot_gb=snapshot_gb, snapshot_gib=snapshot_gib, worker_mbps=worker_mbps, worker_mb_per_s=worker_mb_per_s,
        staleness_budget=staleness, publish_period=publish_period, gamma=gamma, rule=rule.value, offers=offers,
        spot=spot, policy=policy.value if policy else None, learner_usd_per_h=learner_usd_per_h, rental_h=rental_h,
        budget_usd_per_h=budget_usd_per_h, pool_rate_per_s=pool_rate, use_all=use_all, parameters=parameters,
        kv_bytes_per_token=kv_bytes_per_token, prompt_tokens=prompt_tokens, reply_tokens=reply_tokens,
        group_size=group_size, efficiency=efficiency, machines=machines,
        measured=tuple(flag.measured_rate(text) for text in measured or []),
    )  # fmt: skip
    _answer(gather(given, read_source(run)), as_json)


def _answer(inputs: Inputs, as_json: bool) -> None:
    from echo2.cli import plan_json, plan_view
    from echo2.errors import UserError
    from echo2.provisioning.capacity import Infeasible
    from echo2.provisioning.plan import answer, survey
    from echo2.provisioning.question import Use
    from echo2.provisioning.ways_out import sentence, ways_out

    ask, market, question = inputs.ask, inputs.market, inputs.question
    found: list[Plan] = []
    try:
        found = survey(ask, market, question) if isinstance(question, Use) else []
        best = answer(ask, market, question)
    except Infeasible as error:
        ways = ways_out(ask, market, question)
        told = sentence(error, ways)
        if as_json:
            print_json(plan_json.refusal(inputs, found, told, ways))
        elif found:
            show(plan_view.surveyed(found), least_columns=LEAST_COLUMNS)
        raise UserError(told) from error
    faster = _faster(inputs)
    if as_json:
        print_json(plan_json.facts(inputs, best, found, faster))
    else:
        show(plan_view.view(inputs, best, found, faster), least_columns=LEAST_COLUMNS)


def _faster(inputs: Inputs) -> Plan:
    """The same question with a tenth of T_bcast, everything else as it is; where there was an answer, there is one."""
    from echo2.provisioning.plan import answer

    t_bcast_s = inputs.ask.demand.times.t_bcast_s / 10
    return answer(inputs.ask.with_t_bcast(t_bcast_s), inputs.market, inputs.question)

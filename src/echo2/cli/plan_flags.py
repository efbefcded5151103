"""The options of ``echo2 plan``.

Invariant: what a flag lets through is a plain number in the unit that its name or metavar states, finite and in range;
anything else is refused with the flag's name, and with the number to write where the text is in another unit.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import typer

from echo2.provisioning.cells import UNKNOWN_ADVICE, BadCell, Quantity
from echo2.provisioning.demand import LARGEST_STALENESS_BUDGET

SMALLEST_S = 1e-6


class RuleName(StrEnum):
    paper = "paper"
    overlapped = "overlapped"


class PolicyName(StrEnum):
    cheapest = "cheapest"
    exact = "exact"
    greedy = "greedy"
    random = "random"


def _number(quantity: Quantity) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return quantity.read(text)
        except BadCell as error:
            raise typer.BadParameter(str(error).removesuffix(UNKNOWN_ADVICE)) from None

    return read


def _whole(quantity: Quantity) -> Callable[[str], int]:
    read = _number(quantity)
    return lambda text: int(read(text))


def _kappa(text: str) -> str:
    if text == "auto":
        return text
    return str(_whole(Quantity("steps, or auto", least=1, most=1e6, whole=True))(text))


_SECONDS = _number(Quantity("seconds", over=0.0, least=SMALLEST_S))
_USD_PER_H = Quantity("USD per hour", over=0.0, least=1e-9)
_PER_S = _number(Quantity("trajectories per second", over=0.0, least=1e-9))
_TOKENS = Quantity("tokens", over=0.0)

_TIMES, _STALENESS, _MARKET = "The run", "Staleness and capacity", "The market"
_QUESTIONS, _ESTIMATE = "Other questions", "Throughput where nobody has measured it"

TTrain = Annotated[
    float | None,
    typer.Option("--t-train", metavar="SECONDS", parser=_SECONDS, rich_help_panel=_TIMES, help="Of a training step."),
]
TBcast = Annotated[
    float | None,
    typer.Option(
        "--t-bcast", metavar="SECONDS", parser=_SECONDS, rich_help_panel=_TIMES,
        help="From a publish to the share 1/gamma of the workers installed.",
    ),
]  # fmt: skip
TGen = Annotated[
    float | None,
    typer.Option(
        "--t-gen", metavar="SECONDS", parser=_number(Quantity("seconds", least=0.0)), rich_help_panel=_TIMES,
        help="To finish a group; 0 if left out.",
    ),
]  # fmt: skip
RolloutsPerStep = Annotated[
    int | None,
    typer.Option(
        "--rollouts-per-step", metavar="R", parser=_whole(Quantity("trajectories", least=1, whole=True)),
        rich_help_panel=_TIMES, help="Trajectories (prompts x group size) that a step consumes.",
    ),
]  # fmt: skip
SnapshotGb = Annotated[
    float | None,
    typer.Option(
        "--snapshot-gb", metavar="GB", parser=_number(Quantity("GB", over=0.0)), rich_help_panel=_TIMES,
        help="What a publish sends to each worker, whole or delta; 1 GB is 10^9 bytes.",
    ),
]  # fmt: skip
SnapshotGib = Annotated[
    float | None,
    typer.Option(
        "--snapshot-gib", metavar="GiB", parser=_number(Quantity("GiB", over=0.0)), rich_help_panel=_TIMES,
        help="The same in GiB, 2^30 bytes.",
    ),
]  # fmt: skip
WorkerMbps = Annotated[
    float | None,
    typer.Option(
        "--worker-mbps", metavar="MBPS", parser=_number(Quantity("Mbps", over=0.0)), rich_help_panel=_TIMES,
        help="10^6 bits per second that reach a worker; gives T_bcast from the size.",
    ),
]  # fmt: skip
WorkerMbPerS = Annotated[
    float | None,
    typer.Option(
        "--worker-mb-per-s", metavar="MB/S", parser=_number(Quantity("MB per second", over=0.0)),
        rich_help_panel=_TIMES, help="The same in 10^6 bytes per second.",
    ),
]  # fmt: skip
Staleness = Annotated[
    int | None,
    typer.Option(
        "--staleness", metavar="S", rich_help_panel=_STALENESS,
        parser=_whole(Quantity("steps", least=0, most=LARGEST_STALENESS_BUDGET, whole=True)),
        help="Staleness budget: steps that a trajectory may lag.",
    ),
]  # fmt: skip
PublishPeriod = Annotated[
    str | None,
    typer.Option(
        "--publish-period", metavar="N|auto", parser=_kappa, rich_help_panel=_STALENESS,
        help="kappa: steps between two publishes; S - 1 if left out, auto for the cheapest.",
    ),
]  # fmt: skip
Gamma = Annotated[
    float | None,
    typer.Option(
        "--gamma", metavar="X", parser=_number(Quantity("factor", least=1.0, most=1000.0)),
        rich_help_panel=_STALENESS, help="Safety factor on the required rate; 1.1 if left out.",
    ),
]  # fmt: skip
RuleOption = Annotated[
    RuleName,
    typer.Option(
        "--rule", rich_help_panel=_STALENESS,
        help="Requirement: equation (2), or (2') for workers that go on while weights travel.",
    ),
]  # fmt: skip
Offers = Annotated[
    str | None,
    typer.Option(
        "--offers", metavar="CSV|DIR|prices", rich_help_panel=_MARKET,
        help="A CSV file of offers, a folder of SkyPilot's catalog or a vms.csv of it, or the list that comes with "
        "this package.",
    ),
]  # fmt: skip
Spot = Annotated[bool, typer.Option("--spot", rich_help_panel=_MARKET, help="Take a catalog's spot prices.")]
PolicyOption = Annotated[
    PolicyName | None,
    typer.Option("--policy", rich_help_panel=_MARKET, help="How machines are chosen; cheapest if left out."),
]
Learner = Annotated[
    float | None,
    typer.Option(
        "--learner-usd-per-h", metavar="USD", parser=_number(_USD_PER_H), rich_help_panel=_MARKET,
        help="Price of the learner's machine; part of the cost where it is known.",
    ),
]  # fmt: skip
RentalH = Annotated[
    float | None,
    typer.Option(
        "--rental-h", metavar="H", parser=_number(Quantity("hours", over=0.0, least=1e-3)), rich_help_panel=_MARKET,
        help="Hours that machines are kept; matters to offers with a minimum rental.",
    ),
]  # fmt: skip
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget-usd-per-h", metavar="USD", parser=_number(_USD_PER_H), rich_help_panel=_QUESTIONS,
        help="The shortest step that so much an hour buys, the learner's price included.",
    ),
]  # fmt: skip
PoolRate = Annotated[
    float | None,
    typer.Option(
        "--pool-rate", metavar="PER_S", parser=_PER_S, rich_help_panel=_QUESTIONS,
        help="Which S and kappa a pool of so many trajectories/s serves, and with what bubble.",
    ),
]  # fmt: skip
UseAll = Annotated[
    bool,
    typer.Option("--use-all", rich_help_panel=_QUESTIONS, help="The same for all machines of --offers together."),
]
Parameters = Annotated[
    float | None,
    typer.Option(
        "--parameters", metavar="N", parser=_number(Quantity("parameters", over=0.0, most=1e15)),
        rich_help_panel=_ESTIMATE, help="Of the model, such as 8.2e9.",
    ),
]  # fmt: skip
KvBytes = Annotated[
    float | None,
    typer.Option(
        "--kv-bytes-per-token", metavar="BYTES", parser=_number(Quantity("bytes", over=0.0)),
        rich_help_panel=_ESTIMATE, help="Keys and values: 2 x layers x kv heads x head size x 2 for bf16.",
    ),
]  # fmt: skip
PromptTokens = Annotated[
    float | None,
    typer.Option(
        "--prompt-tokens",
        metavar="N",
        parser=_number(_TOKENS),
        rich_help_panel=_ESTIMATE,
        help="Mean; 200 if left out.",
    ),
]
ReplyTokens = Annotated[
    float | None,
    typer.Option(
        "--reply-tokens", metavar="N", parser=_number(_TOKENS), rich_help_panel=_ESTIMATE,
        help="Mean, not the limit; a run folder knows it.",
    ),
]  # fmt: skip
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size", metavar="N", parser=_whole(Quantity("trajectories", least=1, whole=True)),
        rich_help_panel=_ESTIMATE, help="Replies that share a prompt.",
    ),
]  # fmt: skip
Efficiency = Annotated[
    float | None,
    typer.Option(
        "--efficiency", metavar="SHARE", parser=_number(Quantity("share", over=0.0, most=1.0)),
        rich_help_panel=_ESTIMATE, help="Of the GPU's peaks that is reached; 0.5 if left out.",
    ),
]  # fmt: skip
Machines = Annotated[
    int | None,
    typer.Option(
        "--machines", metavar="N", parser=_whole(Quantity("machines", least=1, most=1e6, whole=True)),
        rich_help_panel=_ESTIMATE, help="Of each kind that a price list has; 16 if left out.",
    ),
]  # fmt: skip
MeasuredRates = Annotated[
    list[str] | None,
    typer.Option(
        "--measured", metavar="GPU[=PER_S]", rich_help_panel=_ESTIMATE,
        help="Trajectories/s that one such GPU delivered, in place of an estimate; without a number, what the run "
        "folder measured. Repeatable.",
    ),
]  # fmt: skip


def measured_rate(text: str) -> tuple[str, float | None]:
    """A GPU and its rate from ``--measured``."""
    gpu, equals, number = text.partition("=")
    if not gpu.strip() or (equals and not number.strip()):
        raise typer.BadParameter(f"--measured must be GPU or GPU=PER_S, got {text!r}")
    try:
        return gpu.strip(), _PER_S(number) if equals else None
    except typer.BadParameter as error:
        raise typer.BadParameter(f"--measured {gpu.strip()}: {error}") from None

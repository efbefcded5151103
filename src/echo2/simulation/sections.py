"""Every key of a scenario beside those of a run's configuration.

Invariant: as in ``config.sections``: a key that is here is read, one that is not is an error. Units end names.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from echo2.config.sections import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Section, Sigma

LONGEST_NAME = 40


def _named(name: str) -> str:
    if re.fullmatch(r"[a-z0-9][a-z0-9-]*", name) is None or len(name) > LONGEST_NAME:
        raise PydanticCustomError("must", "be 1 to 40 small letters, digits and dashes, no dash first")
    return name


Name = Annotated[str, AfterValidator(_named)]
Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
PerHour = Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
"""What comes more often than once a second leaves a machine no time."""
Factor = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, le=100_000)]


class WorldSection(Section):
    seed: NonNegative = 0
    """Another seed, another run of the same scenario."""
    uplink_mbps: PositiveFloat = 1000.0
    """B_0: the coordinator's line, shared by all transfers from it."""
    learner_latency_s: NonNegativeFloat = 0.001
    """One way between learner and coordinator."""
    checkpoint_s: NonNegativeFloat = 1.0
    """The learner's checkpoint, before a version is published."""
    snapshot_s: NonNegativeFloat = 0.5
    """Writing a snapshot."""
    delta_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.01
    """Size of a delta as a share of the snapshot; 0 sends every version whole."""
    relays: Literal["planned", "nodes", "none"] = "planned"
    """How snapshots reach workers: `planned`, along the production plan as fluid streams; `nodes`, by the relays' own
    state machines, for a few dozen workers; `none`, each from the coordinator over HTTP."""
    pieces: Annotated[int, Field(ge=1, le=32)] = 32
    """Of a snapshot in a fluid stream; fewer are faster to simulate."""
    generation: Literal["continues", "pauses"] = "continues"
    """While a snapshot is on its way: `continues`, as the product's engines do; `pauses`, as equation (2) assumes."""
    horizon_h: PositiveFloat = 24 * 365.0
    """Virtual time after which a run that has not ended is an error."""
    warm_up_steps: NonNegative = 0
    """Left out of what is said of the settled run."""


class MachineSection(Section):
    """What one machine is like; missing times are those of `[rehearsal]`."""

    name: Name
    """Of its kind."""
    count: Count = 1
    """How many there are."""
    usd_per_h: NonNegativeFloat = 0.0
    """Price of one."""
    group_s: NonNegativeFloat | None = None
    """Median time in which it generates a group, where that is not worked out from tokens."""
    group_spread: Sigma | None = None
    """Log-normal sigma of that time."""
    tokens_per_s: NonNegativeFloat = 0.0
    """Of one reply; above 0 a group's time is worked out from the lengths of its replies."""
    places: Positive = 16
    """Replies generated side by side."""
    prefill_s: NonNegativeFloat = 0.0
    """Reading the prompt, once per group."""
    median_tokens: PositiveFloat = 400.0
    """Of a reply."""
    tail: Literal["lognormal", "pareto"] = "lognormal"
    """Of the lengths of replies."""
    tail_spread: Sigma = 0.6
    """Log-normal: sigma; Pareto: 1/alpha."""
    slowness: Factor = 1.0
    """Factor on its times."""
    slow_spells_per_h: PerHour = 0.0
    """Times in which it is slow."""
    slow_spell_s: PositiveFloat = 300.0
    """Mean."""
    slow_spell_factor: Factor = 3.0
    """Factor on its times then."""
    decode_s: NonNegativeFloat = 0.0
    """From an object that came to weights on its disk; it generates meanwhile."""
    activation_s: NonNegativeFloat = 0.5
    """To switch to a snapshot that is there."""
    down_mbps: PositiveFloat = 100.0
    """Its line."""
    up_mbps: PositiveFloat | None = None
    """As fast as down where it is missing."""
    latency_s: NonNegativeFloat = 0.02
    """One way."""
    jitter: NonNegativeFloat = 0.2
    """Share of the latency that varies."""
    loss: Share = 0.0
    """Probability that a message is lost; transfers lose so much of the line's rate."""
    reachable: bool = True
    """Others can dial it."""
    clock_skew_s: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """How wrong its clock is."""
    preemptions_per_h: PerHour = 0.0
    """It is taken away for good, without notice."""
    crashes_per_h: PerHour = 0.0
    """Its worker dies and begins again."""
    restart_s: NonNegativeFloat = 30.0
    """After a crash."""
    outages_per_h: PerHour = 0.0
    """Its line goes down and comes back."""
    outage_s: PositiveFloat = 20.0
    """Mean."""


class WorkersSection(MachineSection):
    """Machines whose workers join by themselves."""

    arrives_s: NonNegativeFloat = 0.0
    """When the first of them joins; 0 for the start."""
    arrives_every_s: NonNegativeFloat = 0.0
    """Between one and the next."""


class OfferSection(MachineSection):
    """Machines that the run can rent."""

    rollouts_per_s: PositiveFloat | None = None
    """What its seller says that one delivers; worked out from its times where it is missing."""
    traffic_usd_per_gb: NonNegativeFloat = 0.0
    """Price of a GB received."""
    min_rental_h: NonNegativeFloat = 0.0
    """Billed at least."""
    reliability: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Share of the time in which its seller says that it is up."""
    start_s: NonNegativeFloat = 60.0
    """From the order until its worker runs."""


class EventSection(Section):
    """Something that happens once."""

    what: Literal["kill", "preempt", "slow", "cut", "price"]
    """`kill`: the program dies and begins again after `for_s`; `preempt`: the machine is taken away; `slow`: it takes
    `factor` times as long, for `for_s` or for good; `cut`: its line is down for `for_s`; `price`: an offer's, from then
    on."""
    who: str = "*"
    """Workers, `*` and `?` standing for any: `card-3`, `rtx5090-*`; or `learner`, or `coordinator`, which can only be
    killed. For `price`, offers."""
    most: NonNegative = 0
    """Only so many of them; 0 for all."""
    at_s: NonNegativeFloat | None = None
    """When; or"""
    at_step: Positive | None = None
    """after so many steps."""
    factor: Factor = 2.0
    """Of `slow`."""
    for_s: NonNegativeFloat = 0.0
    """Of `kill`, `slow` and `cut`."""
    usd_per_h: NonNegativeFloat = 0.0
    """Of `price`."""

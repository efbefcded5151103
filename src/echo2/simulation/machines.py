"""From what a scenario says of a machine to the models of its worker.

Invariant: pure; the same section gives the same model, and what it leaves out is that of ``[rehearsal]``.
"""

from __future__ import annotations

import math
from random import Random

from echo2.config.root import Config
from echo2.provisioning.offers import Offer
from echo2.simulation.engines import EngineModel, LengthModel
from echo2.simulation.fates import FateModel, SlowSpells
from echo2.simulation.links import LinkModel
from echo2.simulation.models import WorkerModel
from echo2.simulation.pool import MachineModel
from echo2.simulation.sections import MachineSection, OfferSection

BYTES_PER_S_PER_MBPS = 1e6 / 8
_DRAWS = 400
"""Groups that a mean time is taken of."""


def worker_model(config: Config, kind: MachineSection, name: str, *, arrives_s: float = 0.0) -> WorkerModel:
    pace = config.rehearsal
    return WorkerModel(
        name=name,
        link=LinkModel(
            latency_s=kind.latency_s,
            jitter=kind.jitter,
            bytes_per_s=kind.down_mbps * BYTES_PER_S_PER_MBPS,
            up_bytes_per_s=(kind.up_mbps or 0.0) * BYTES_PER_S_PER_MBPS,
            reachable=kind.reachable,
            loss=kind.loss,
        ),
        group_s=(pace.group_s if kind.group_s is None else kind.group_s) * kind.slowness,
        spread=pace.group_spread if kind.group_spread is None else kind.group_spread,
        decode_s=kind.decode_s,
        activation_s=kind.activation_s,
        clock_skew_s=kind.clock_skew_s,
        engine=_engine(kind),
        usd_per_h=kind.usd_per_h,
        fate=_fate(kind, arrives_s),
    )


def machine_model(config: Config, kind: OfferSection) -> MachineModel:
    """rollouts_per_s: as its seller says, or else as it will be."""
    offer = Offer(
        name=kind.name, gpu="modelled", count=kind.count, usd_per_h=kind.usd_per_h,
        rollouts_per_s=kind.rollouts_per_s or rate_per_s(config, kind), traffic_usd_per_gb=kind.traffic_usd_per_gb,
        min_rental_h=kind.min_rental_h, reliability=kind.reliability,
    )  # fmt: skip
    worker = worker_model(config, kind, kind.name)
    return MachineModel(offer, worker.group_s, kind.start_s, worker)


def rate_per_s(config: Config, kind: MachineSection) -> float:
    """What one of these machines delivers while it has work: trajectories per second."""
    return config.rollout.group_size * config.rollout.concurrent_groups / mean_group_s(config, kind)


def mean_group_s(config: Config, kind: MachineSection) -> float:
    """T_gen of one of these machines."""
    rollout, model = config.rollout, worker_model(config, kind, kind.name)
    if model.engine is None:
        return model.group_s * math.exp(model.spread**2 / 2)  # of a log-normal distribution with this median
    random, lanes = Random(0), rollout.concurrent_groups
    times = [model.engine.group_s(random, rollout.group_size, rollout.max_new_tokens, lanes) for _ in range(_DRAWS)]
    return math.fsum(times) / len(times)


def _engine(kind: MachineSection) -> EngineModel | None:
    if not kind.tokens_per_s:
        return None
    return EngineModel(
        tokens_per_s=kind.tokens_per_s,
        places=kind.places,
        prefill_s=kind.prefill_s,
        lengths=LengthModel(kind.median_tokens, kind.tail, kind.tail_spread),
        slowness=kind.slowness,
    )


def _fate(kind: MachineSection, arrives_s: float) -> FateModel:
    return FateModel(
        preemptions_per_h=kind.preemptions_per_h,
        crashes_per_h=kind.crashes_per_h,
        restart_s=kind.restart_s,
        outages_per_h=kind.outages_per_h,
        outage_s=kind.outage_s,
        arrives_s=arrives_s,
        spells=SlowSpells(kind.slow_spells_per_h, kind.slow_spell_s, kind.slow_spell_factor),
    )

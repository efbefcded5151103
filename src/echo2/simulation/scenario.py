"""A scenario file: a run's configuration, the world it runs in, and what happens there.

Invariant: either a playable ``Scenario`` comes back or one ``ConfigError`` holds a sentence for each fault; what is
certain to fail (nobody to generate, an overlap that no pool can reach) is told before anything is simulated.

    [run] [rollout] [staleness] [rehearsal] …    as in a run's configuration; learner and engine are the scripted ones
    config = "run.toml"                          the same from a file; what stands here wins
    [world]                                      lines, sizes, how long
    [[workers]]                                  machines whose workers join by themselves
    [[offers]]                                   machines that the run's controller can rent
    [[events]]                                   what happens when
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec

from echo2.config.load import build_config, check_table, read_tables
from echo2.config.override import apply_override, parse_overrides
from echo2.config.root import Config
from echo2.config.sections import Section
from echo2.errors import ConfigError, UserError
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.demand import Cadence, Demand, Times
from echo2.provisioning.offers import Offer
from echo2.simulation import coin
from echo2.simulation.engines import EngineModel, LengthModel
from echo2.simulation.fates import FateModel, SlowSpells
from echo2.simulation.links import LinkModel
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.pool import MachineModel
from echo2.simulation.sections import EventSection, MachineSection, OfferSection, WorkersSection, WorldSection

S = TypeVar("S", bound=Section)

BYTES_PER_S_PER_MBPS = 1e6 / 8
_DRAWS = 400
"""Groups that a mean time is taken of."""
_TABLES = ("world",)
_ARRAYS = ("workers", "offers", "events")
_SCRIPTED = {"rollout": {"engine": "scripted"}, "learning": {"learner": "scripted"}}


class Scenario(msgspec.Struct, frozen=True):
    name: str
    config: Config
    world: WorldSection
    workers: tuple[WorkersSection, ...]
    offers: tuple[OfferSection, ...]
    events: tuple[EventSection, ...]

    def world_model(self) -> WorldModel:
        pace, world = self.config.rehearsal, self.world
        return WorldModel(
            learner=LearnerModel(
                train_s=pace.train_s,
                spread=pace.train_spread,
                checkpoint_s=world.checkpoint_s,
                snapshot_s=world.snapshot_s,
                snapshot_bytes=float(pace.snapshot_bytes),
            ),
            uplink_bytes_per_s=world.uplink_mbps * BYTES_PER_S_PER_MBPS,
            delta_bytes=world.delta_share * pace.snapshot_bytes,
            relays=world.relays,
            pieces=world.pieces,
            pauses=world.generation == "pauses",
        )

    def worker_models(self) -> list[WorkerModel]:
        return [
            msgspec.structs.replace(
                self._worker(group, f"{group.name}-{number}"),
                fate=_fate(group, group.arrives_s + (number - 1) * group.arrives_every_s),
            )
            for group in self.workers
            for number in range(1, group.count + 1)
        ]

    def machine_models(self) -> dict[str, MachineModel]:
        found = {}
        for kind in self.offers:
            rate = kind.rollouts_per_s or self.rate_per_s(kind)
            offer = Offer(
                name=kind.name, gpu="modelled", count=kind.count, usd_per_h=kind.usd_per_h, rollouts_per_s=rate,
                traffic_usd_per_gb=kind.traffic_usd_per_gb, min_rental_h=kind.min_rental_h,
                reliability=kind.reliability,
            )  # fmt: skip
            worker = msgspec.structs.replace(self._worker(kind, kind.name), fate=_fate(kind, 0.0))
            found[kind.name] = MachineModel(offer, worker.group_s, kind.start_s, worker)
        return found

    def rate_per_s(self, kind: MachineSection) -> float:
        """What one of these machines delivers while it has work: trajectories per second."""
        rollout, model = self.config.rollout, self._worker(kind, kind.name)
        random = Random(0)
        if model.engine is None:
            times = [model.group_s * random.lognormvariate(0.0, model.spread) for _ in range(_DRAWS)]
        else:
            lanes = rollout.concurrent_groups
            times = [
                model.engine.group_s(random, rollout.group_size, rollout.max_new_tokens, lanes) for _ in range(_DRAWS)
            ]
        mean_s = sum(times) / len(times)
        if mean_s <= 0:
            raise UserError(f"machines of {kind.name} must take time: give group_s, tokens_per_s or rehearsal.group_s")
        return rollout.group_size * rollout.concurrent_groups / mean_s

    def times(self) -> Times:
        """As the scenario states them; T_bcast as if the nearest worker were the only one: no plan is faster."""
        pace, config = self.config.rehearsal, self.config
        machines = (*self.workers, *self.offers)
        fastest = min(self.world.uplink_mbps, max(kind.down_mbps for kind in machines))
        sent_bytes = pace.snapshot_bytes * (self.world.delta_share or 1.0)
        least_s = self.world.checkpoint_s + self.world.snapshot_s + sent_bytes / (fastest * BYTES_PER_S_PER_MBPS)
        return Times(
            t_train_s=pace.train_s, t_bcast_s=least_s, rollouts_per_step=config.rollout.rollouts_per_step,
            t_gen_s=min(self._worker(kind, kind.name).group_s for kind in machines),
        )  # fmt: skip

    def impossible(self) -> str:
        """Why no pool can keep the learner busy, or empty; such a run ends all the same, with a learner that waits."""
        config = self.config
        if config.run.mode != "echo2":
            return ""
        demand = Demand(times=self.times(), rule=config.provisioning.rule, gamma=config.provisioning.gamma)
        try:
            demand.required_per_s(Cadence(config.staleness_budget, config.publish_period))
        except Infeasible as error:
            return str(error)
        return ""

    def _worker(self, kind: MachineSection, name: str) -> WorkerModel:
        pace = self.config.rehearsal
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
            activation_s=kind.activation_s,
            clock_skew_s=kind.clock_skew_s,
            engine=_engine(kind),
            usd_per_h=kind.usd_per_h,
        )


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


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Raises ConfigError, with a sentence for every fault."""
    return build_scenario(read_tables(path), overrides, base=path.parent, name=path.stem)


def build_scenario(
    tables: Mapping[str, Any], overrides: Sequence[str] = (), *, base: Path | None = None, name: str = "scenario"
) -> Scenario:
    """The same for tables that are parsed already."""
    base = base or Path.cwd()
    merged = _merged(_base_tables(tables, base), {key: value for key, value in tables.items() if key != "config"})
    parsed, faults = parse_overrides(overrides)
    faults += [fault for override in parsed if (fault := apply_override(merged, override))]
    own = {key: merged.pop(key) for key in (*_TABLES, *_ARRAYS) if key in merged}
    blamed: set[str] = set()
    world = _table(WorldSection, "world", own.get("world", {}), faults, blamed)
    workers = _array(WorkersSection, "workers", own.get("workers", []), faults, blamed)
    offers = _array(OfferSection, "offers", own.get("offers", []), faults, blamed)
    events = _array(EventSection, "events", own.get("events", []), faults, blamed)
    config = _config(merged, base, faults)
    if config is not None and not blamed:
        faults += _relations(config, workers, offers, events)
    if faults or config is None:
        raise ConfigError(faults)
    return Scenario(name, config, world, workers, offers, events)


def _base_tables(tables: Mapping[str, Any], base: Path) -> dict[str, Any]:
    named = tables.get("config")
    if named is None:
        return {}
    if not isinstance(named, str):
        raise ConfigError(f"config must be the path of a run's configuration, got {named!r}")
    return read_tables(base / named)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _config(tables: dict[str, Any], base: Path, faults: list[str]) -> Config | None:
    tables.pop("pools", None)  # the world has its own
    whole = _merged(tables, _SCRIPTED)
    whole.setdefault("run", {}).setdefault("name", "simulated")
    whole.setdefault("tasks", [{"name": coin.NAME}])
    try:
        return build_config(whole, base=base, check_places=False)
    except ConfigError as error:
        faults += error.faults
        return None


def _array(model: type[S], name: str, value: Any, faults: list[str], blamed: set[str]) -> tuple[S, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        faults.append(f"{name} must be an array of tables; write [[{name}]] with double brackets")
        blamed.add(name)
        return ()
    return tuple(_table(model, f"{name}.{index}", item, faults, blamed) for index, item in enumerate(value))


def _table(model: type[S], label: str, value: Any, faults: list[str], blamed: set[str]) -> S:
    if not isinstance(value, dict):
        faults.append(f"[{label}] must be a table of keys; write [{label}] on a line of its own")
        blamed.add(label)
        value = {}

    def unknown(key: str) -> str:
        near = difflib.get_close_matches(key, model.model_fields, 1, 0.0)
        blamed.add(f"{label}.{key}")
        return f"unknown key `{key}` in {label}; the nearest known key is `{near[0]}`"

    return check_table(model, label, value, faults, blamed, unknown)


def _relations(
    config: Config, workers: Sequence[WorkersSection], offers: Sequence[OfferSection], events: Sequence[EventSection]
) -> list[str]:
    faults = []
    if not workers and not offers:
        faults.append("a scenario must have somebody to generate: add [[workers]], or [[offers]] to rent from")
    if config.rehearsal.train_s <= 0:
        faults.append("rehearsal.train_s must be more than 0: it is T_train, the time of a training step")
    names = [kind.name for kind in (*workers, *offers)]
    faults += [f"names must differ, got {name!r} twice" for name in sorted({n for n in names if names.count(n) > 1})]
    for kind in (*workers, *offers):
        if not kind.tokens_per_s and not (config.rehearsal.group_s if kind.group_s is None else kind.group_s):
            faults.append(f"machines of {kind.name} must take time: give group_s, tokens_per_s or rehearsal.group_s")
    faults += [f"usd_per_h of the offer {kind.name} must be more than 0" for kind in offers if not kind.usd_per_h]
    if offers and config.run.mode != "echo2":
        faults.append('[[offers]] need run.mode = "echo2", by whose overlap capacity is planned')
    for index, event in enumerate(events):
        if (event.at_s is None) == (event.at_step is None):
            faults.append(f"events.{index} must have one of at_s and at_step")
        if event.what == "price" and not event.usd_per_h:
            faults.append(f"events.{index} must have a usd_per_h above 0: it is a new price")
    return faults

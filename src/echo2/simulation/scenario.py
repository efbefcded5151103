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
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from echo2.config.load import build_config, check_table, read_tables
from echo2.config.override import apply_override, parse_overrides
from echo2.config.places import resolve_places
from echo2.config.render import render_sections
from echo2.config.root import Config
from echo2.config.schema import LISTS, POOLS, SECTIONS, unknown_key
from echo2.config.sections import Section
from echo2.errors import ConfigError
from echo2.provisioning.capacity import Infeasible
from echo2.provisioning.demand import Cadence, Demand, Times
from echo2.provisioning.question import Ask, Market, Use
from echo2.provisioning.ways_out import sentence, ways_out
from echo2.simulation import coin
from echo2.simulation.links import LinkModel
from echo2.simulation.machines import BYTES_PER_S_PER_MBPS, machine_model, mean_group_s, worker_model
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.pool import MachineModel
from echo2.simulation.relations import broken_relations
from echo2.simulation.sections import EventSection, OfferSection, WorkersSection, WorldSection

S = TypeVar("S", bound=Section)

LEARNER_BYTES_PER_S = 1.25e9
"""Learner and coordinator stand side by side."""
_PLENTY = 1000
"""A pool so many times as fast as the learner is as good as any."""
_ARRAYS: Mapping[str, type[Section]] = {"workers": WorkersSection, "offers": OfferSection, "events": EventSection}
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
            learner_link=LinkModel(latency_s=world.learner_latency_s, bytes_per_s=LEARNER_BYTES_PER_S),
            uplink_bytes_per_s=world.uplink_mbps * BYTES_PER_S_PER_MBPS,
            delta_bytes=world.delta_share * pace.snapshot_bytes,
            relays=world.relays,
            pieces=world.pieces,
            pauses=world.generation == "pauses",
        )

    def worker_models(self) -> list[WorkerModel]:
        return [
            worker_model(
                self.config, kind, f"{kind.name}-{number}",
                arrives_s=kind.arrives_s + (number - 1) * kind.arrives_every_s,
            )
            for kind in self.workers
            for number in range(1, kind.count + 1)
        ]  # fmt: skip

    def machine_models(self) -> dict[str, MachineModel]:
        return {kind.name: machine_model(self.config, kind) for kind in self.offers}

    def times(self) -> Times:
        """As the scenario states them; T_bcast as if the nearest worker were the only one: no plan is faster."""
        pace, config = self.config.rehearsal, self.config
        machines = (*self.workers, *self.offers)
        fastest = min(self.world.uplink_mbps, max(kind.down_mbps for kind in machines))
        sent_bytes = pace.snapshot_bytes * (self.world.delta_share or 1.0)
        least_s = self.world.checkpoint_s + self.world.snapshot_s + sent_bytes / (fastest * BYTES_PER_S_PER_MBPS)
        return Times(
            t_train_s=pace.train_s, t_bcast_s=least_s, rollouts_per_step=config.rollout.rollouts_per_step,
            t_gen_s=min(mean_group_s(config, kind) for kind in machines),
        )  # fmt: skip

    def impossible(self) -> str:
        """Why no pool can keep the learner busy, and what to change; or empty. Such a run ends all the same, with a
        learner that waits."""
        config = self.config
        if config.run.mode != "echo2":
            return ""
        demand = Demand(times=self.times(), rule=config.provisioning.rule, gamma=config.provisioning.gamma)
        cadence = Cadence(config.staleness_budget, config.publish_period)
        try:
            demand.required_per_s(cadence)
        except Infeasible as error:
            ask = Ask(demand=demand, staleness_budget=None).at(cadence)
            plenty = Use(_PLENTY * config.rollout.rollouts_per_step / config.rehearsal.train_s)
            return sentence(error, ways_out(ask, Market(), plenty))
        return ""


def render_scenario(scenario: Scenario) -> str:
    """Every key with its value, below its meaning; read again, it is the same scenario."""
    arrays = {"workers": scenario.workers, "offers": scenario.offers, "events": scenario.events}
    config = {name: getattr(scenario.config, name) for name in SECTIONS if name not in (POOLS, "workers")}
    return render_sections({**config, "world": scenario.world, **arrays}, {**LISTS, **_ARRAYS})


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_scenario(path: Path, overrides: Sequence[str] = ()) -> Scenario:
    """Raises ConfigError, with a sentence for every fault."""
    return build_scenario(read_tables(path), overrides, base=path.parent, name=path.stem)


def build_scenario(
    tables: Mapping[str, Any], overrides: Sequence[str] = (), *, base: Path | None = None, name: str = "scenario"
) -> Scenario:
    """The same for tables that are parsed already; they are left as they are."""
    base = base or Path.cwd()
    below, own = _base_tables(tables.get("config"), base), deepcopy({k: v for k, v in tables.items() if k != "config"})
    resolve_places(own, base)
    # A run's [workers] are those of its machine; here they are machines of the world.
    wide, settings = (
        _merged({key: value for key, value in below.items() if key != "workers"}, own),
        below.get("workers"),
    )
    wide |= {key: [] for key in _ARRAYS if key not in wide}
    parsed, faults = parse_overrides(overrides)
    faults += [fault for override in parsed if (fault := apply_override(wide, override))]
    resolve_places(wide, Path.cwd())
    world, workers, offers, events = wide.pop("world", {}), *(wide.pop(key) for key in _ARRAYS)
    blamed: set[str] = set()
    scenario = (
        _table(WorldSection, "world", world, faults, blamed),
        _array(WorkersSection, "workers", workers, faults, blamed),
        _array(OfferSection, "offers", offers, faults, blamed),
        _array(EventSection, "events", events, faults, blamed),
    )
    config = _config(wide if settings is None else {**wide, "workers": settings}, faults)
    if config is not None and not blamed:
        faults += broken_relations(config, *scenario[1:])
    if faults or config is None:
        raise ConfigError(faults)
    return Scenario(name, config, *scenario)


def _base_tables(named: Any, base: Path) -> dict[str, Any]:
    """Of the run's configuration that the scenario names, without what a scenario has in other words."""
    if named is None:
        return {}
    if not isinstance(named, str) or not named:
        raise ConfigError(f'config must be the path of a run\'s configuration in quotes ("…"), got {named!r}')
    path = base / Path(named).expanduser()
    tables = read_tables(path)
    resolve_places(tables, path.parent)
    tables.pop("pools", None)
    return tables


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = _merged(under, value) if isinstance(under, dict) and isinstance(value, dict) else value
    return merged


def _config(tables: Mapping[str, Any], faults: list[str]) -> Config | None:
    """Of the run, with a learner and engines that take time and do nothing."""
    known = {key: value for key, value in tables.items() if key in SECTIONS and key != POOLS}
    faults += [_unknown_table(key) for key in tables if key not in known]
    known.setdefault("tasks", [{"name": coin.NAME}])
    for section, keys in (("run", {"name": "simulated"}), *_SCRIPTED.items()):
        table = known.get(section, {})
        if isinstance(table, dict):
            known[section] = keys | table if section == "run" else table | keys
    try:
        return build_config(known, check_places=False)
    except ConfigError as error:
        faults += error.faults
        return None


def _unknown_table(key: str) -> str:
    if key == POOLS:
        return "[[pools]] are of a run; what a scenario can rent is in [[offers]]"
    if key == "config":
        return "config must be set in the scenario's file, not by --set: what it names is read before"
    if near := difflib.get_close_matches(key, ("world", *_ARRAYS), 1, 0.6):
        brackets = "[{}]" if near[0] == "world" else "[[{}]]"
        return f"unknown key `{key}` at top level; the nearest section is {brackets.format(near[0])}"
    return unknown_key("", key)


def _array(model: type[S], name: str, value: Any, faults: list[str], blamed: set[str]) -> tuple[S, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        hint = "; a run's own file is no scenario: name it in one as config" if name == "workers" else ""
        faults.append(f"{name} must be an array of tables; write [[{name}]] with double brackets{hint}")
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

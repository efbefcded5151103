"""Scenario files: what they mean, and what is wrong with them."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
from scenarios import DISTURBED, SMALL, scenario, tables

from echo2.errors import ConfigError
from echo2.simulation.fates import FateModel, SlowSpells
from echo2.simulation.links import LinkModel
from echo2.simulation.scenario import build_scenario, read_scenario

OFFER = {"name": "rented", "usd_per_h": 1.0}


def faults(*overrides: str, base: dict[str, Any] = SMALL, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        scenario(*overrides, base=base, **changes)
    return caught.value.faults


def event(**keys: Any) -> list[dict[str, Any]]:
    return [{"what": "kill", "who": "card-*", "at_s": 1.0, **keys}]


# ---- what they mean --------------------------------------------------------------------------------------------------


def test_learner_and_engine_take_time_and_nothing_else_is_asked_of_them() -> None:
    made = scenario(rollout={"engine": "transformers"}, learning={"learner": "torch"})
    assert (made.config.rollout.engine, made.config.learning.learner) == ("scripted", "scripted")
    assert made.config.run.name == "simulated"


def test_the_world_is_modelled_as_it_is_told() -> None:
    model = scenario("world.uplink_mbps=80", "world.delta_share=0.5", "world.generation=pauses").world_model()
    assert model.uplink_bytes_per_s == 10e6
    assert model.delta_bytes == 5e6
    assert model.pauses
    assert (model.learner.train_s, model.learner.snapshot_bytes, model.relays) == (30.0, 10e6, "planned")


def test_each_of_a_kind_is_a_worker_of_its_own() -> None:
    (kind,) = SMALL["workers"]
    models = scenario(workers=[{**kind, "arrives_s": 10.0, "arrives_every_s": 5.0}]).worker_models()
    assert [model.name for model in models] == ["card-1", "card-2", "card-3"]
    assert [model.fate.arrives_s for model in models] == [10.0, 15.0, 20.0]
    assert {(model.group_s, model.spread, model.usd_per_h) for model in models} == {(15.0, 0.2, 0.5)}


def test_a_machine_is_what_its_keys_say() -> None:
    keys = {
        "group_s": 4.0, "group_spread": 0.0, "slowness": 2.0, "down_mbps": 8.0, "up_mbps": 4.0, "latency_s": 0.1,
        "jitter": 0.5, "loss": 0.25, "reachable": False, "clock_skew_s": -3.0, "activation_s": 7.0,
        "preemptions_per_h": 1.0, "crashes_per_h": 2.0, "restart_s": 3.0, "outages_per_h": 4.0, "outage_s": 5.0,
        "slow_spells_per_h": 6.0, "slow_spell_s": 7.0, "slow_spell_factor": 8.0,
    }  # fmt: skip
    (model,) = scenario(workers=[{"name": "odd", **keys}]).worker_models()
    assert model.link == LinkModel(0.1, 0.5, 1e6, 0.5e6, False, 0.25)
    assert (model.group_s, model.spread, model.engine) == (8.0, 0.0, None)
    assert (model.clock_skew_s, model.activation_s) == (-3.0, 7.0)
    assert model.fate == FateModel(1.0, 2.0, 3.0, 4.0, 5.0, SlowSpells(6.0, 7.0, 8.0))


def test_an_offer_delivers_what_its_seller_says_or_what_its_times_make() -> None:
    offers = [{**OFFER, "name": "stated", "rollouts_per_s": 3.0}, {**OFFER, "name": "timed", "group_s": 8.0}]
    found = scenario(offers=offers).machine_models()
    assert found["stated"].offer.rollouts_per_s == 3.0
    assert found["timed"].offer.rollouts_per_s == pytest.approx(4 / (8.0 * math.exp(0.2**2 / 2)))
    assert found["timed"].group_s == 8.0


def test_the_rate_of_a_machine_with_token_speeds_counts_its_longest_replies() -> None:
    offer = {**OFFER, "tokens_per_s": 10.0, "median_tokens": 40.0, "tail_spread": 0.0, "places": 2, "prefill_s": 1.0}
    found = scenario(offers=[offer]).machine_models()
    assert found["rented"].offer.rollouts_per_s == pytest.approx(4 / (1.0 + 2 * 4.0)), "two after two"


def test_a_runs_configuration_is_taken_over_and_what_stands_here_wins(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "run.toml").write_text(
        '[run]\nsteps = 50\nseed = 4\n[workers]\nlocal = 9\norphan_after_s = 77.0\n[[pools]]\nkind = "standby"\n'
        '[rehearsal]\ntrain_s = 5.0\n[[tasks]]\nname = "integer_answers"\noptions = {path = "problems.jsonl"}\n'
    )
    path = tmp_path / "scenario.toml"
    path.write_text('config = "runs/run.toml"\n[run]\nsteps = 6\n[[workers]]\nname = "a"\ngroup_s = 1.0\n')
    made = read_scenario(path)
    assert (made.name, made.config.run.steps, made.config.run.seed, made.config.rehearsal.train_s) == (
        "scenario", 6, 4, 5.0,
    )  # fmt: skip
    assert made.config.workers.orphan_after_s == 77.0
    assert made.config.pools == ()
    assert made.config.tasks[0].options["path"] == str(tmp_path / "runs" / "problems.jsonl"), "where run.toml lies"
    assert [model.name for model in made.worker_models()] == ["a-1"]


def test_a_configuration_with_workers_of_its_own_is_no_fault_where_all_are_rented(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("[workers]\nlocal = 3\n")
    made = {key: value for key, value in SMALL.items() if key != "workers"}
    assert build_scenario({**made, "config": "run.toml", "offers": [OFFER]}, base=tmp_path).offers[0].name == "rented"


def test_tables_that_are_given_are_left_as_they_are() -> None:
    given = tables()
    build_scenario(given, ["workers.0.count=9", "run.steps=3"])
    assert given == SMALL


# ---- overrides -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("world.uplink_mbps=100", lambda made: made.world.uplink_mbps, 100),
        ("world.relays=none", lambda made: made.world.relays, "none"),
        ("workers.0.count=4", lambda made: made.workers[0].count, 4),
        ("workers.0.name=b", lambda made: made.worker_models()[0].name, "b-1"),
        ("staleness.budget=6", lambda made: made.config.staleness_budget, 6),
        ("run.mode=sync", lambda made: made.config.staleness_budget, 0),
        ("events.0.at_s=9.5", lambda made: made.events[0].at_s, 9.5),
        ("offers.0.usd_per_h=3", lambda made: made.offers[0].usd_per_h, 3),
        ("tasks.0.weight=2.0", lambda made: made.config.tasks[0].weight, 2.0),
    ],
)
def test_an_override_reaches_every_table(override: str, read: Any, value: object) -> None:
    changes: dict[str, Any] = {} if "sync" in override else {"offers": [OFFER]}
    assert read(scenario(override, events=event(who="*-1"), **changes)) == value


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("workers.1.count=4", r"--set workers.N needs a number from 0 to 0, got `1`"),
        ("workers.²5.count=4", r"--set workers.N needs a number from 0 to 0, got `²5`"),
        ("workers.orphan_after_s=4", r"--set workers.N needs a number|name a key of one of them"),
        ("events.0.at_s=4", r"--set events.0 needs a \[\[events\]\] table in the file, and there is none"),
        ("workers=4", r"workers must be an array of tables"),
        ("world=4", r"\[world\] must be a table of keys"),
        ("rollout=3", r"\[rollout\] must be a table of keys, got 3"),
        ("run=3", r"\[run\] must be a table of keys, got 3"),
        ("config=other.toml", "config must be set in the scenario's file, not by --set"),
        ("world.uplink=100", "unknown key `uplink` in world; the nearest known key is `uplink_mbps`"),
        ("world.uplink_mbps", "--set must have the form section.key=value"),
    ],
)
def test_an_override_without_a_place_is_told(override: str, words: str) -> None:
    found = faults(override)
    assert any(re.search(words, fault) for fault in found), found


# ---- what is wrong with them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"workers": []}, "a scenario must have somebody to generate: add [[workers]], or [[offers]] to rent from"),
        ({"workers": {"name": "a"}}, "workers must be an array of tables; write [[workers]] with double brackets"),
        ({"workers": [{"count": 2}]}, "workers.0.name must be given"),
        ({"workers": [{"name": "A b"}]},
         'workers.0.name must be 1 to 40 small letters, digits and dashes, no dash first, got "A b"'),
        ({"workers": [{"name": "a"}, {"name": "a"}]},
         'names of [[workers]] and [[offers]] must differ, got "a" 2 times'),
        ({"offers": [{**OFFER, "name": "card"}]},
         'names of [[workers]] and [[offers]] must differ, got "card" 2 times'),
        ({"workers": [{"name": "a", "cuont": 2}]},
         "unknown key `cuont` in workers.0; the nearest known key is `count`"),
        ({"wrold": {"seed": 1}}, "unknown key `wrold` at top level; the nearest section is [world]"),
        ({"ofers": [OFFER]}, "unknown key `ofers` at top level; the nearest section is [[offers]]"),
        ({"pools": [{"kind": "local"}]}, "[[pools]] are of a run; what a scenario can rent is in [[offers]]"),
        ({"rollout": {"group_size": 3}}, "rollout.rollouts_per_step must be a multiple of rollout.group_size"),
        ({"rehearsal": {"train_s": 0.0}}, "rehearsal.train_s must be more than 0: it is T_train"),
        ({"rehearsal": {"group_s": 0.0}},
         "machines of card must take time: give group_s, tokens_per_s or rehearsal.group_s"),
        ({"world": {"horizon_h": -1.0}}, "world.horizon_h must be more than 0, got -1.0"),
        ({"world": {"uplink_mbps": math.nan}}, "world.uplink_mbps must be a finite number, got nan"),
        ({"world": {"delta_share": math.nan}}, "world.delta_share must be a finite number, got nan"),
        ({"world": {"uplink_mbps": "fast"}}, 'world.uplink_mbps must be a number, got "fast"'),
        ({"world": {"pieces": 1.5}}, "world.pieces must be a whole number, got 1.5"),
        ({"world": {"relays": "pigeons"}}, 'world.relays must be one of "planned", "nodes" or "none", got "pigeons"'),
        ({"workers": [{"name": "a", "clock_skew_s": math.inf}]}, "workers.0.clock_skew_s must be a finite number"),
        ({"workers": [{"name": "a", "reachable": 1}]}, "workers.0.reachable must be true or false, got 1"),
        ({"workers": [{"name": "a", "crashes_per_h": 1e9}]}, "workers.0.crashes_per_h must be at most 3600"),
        ({"workers": [{"name": "a", "group_spread": 1e3}]}, "workers.0.group_spread must be at most 10"),
        ({"workers": [{"name": "a", "count": 10**9}]}, "workers.0.count must be at most 100000"),
        ({"rehearsal": {"snapshot_bytes": 10**400}}, "rehearsal.snapshot_bytes must be at most 1e+15"),
        ({"coordinator": {"heartbeat_s": 1e-9}}, "coordinator.heartbeat_s must be at least 0.01 in a scenario"),
        ({"provisioning": {"period_s": 1e-9}}, "provisioning.period_s must be at least 0.01 in a scenario"),
        ({"workers": [{"name": "a", "places": 4}]}, "a has no tokens_per_s, so nothing reads its places"),
        ({"workers": [{"name": "a", "tokens_per_s": 4.0, "group_s": 1.0}]},
         "a works out a group's time from tokens_per_s, so nothing reads its group_s"),
        ({"workers": [{"name": "a", "arrives_every_s": 4.0}]}, "a is one worker, so nothing reads its arrives_every_s"),
        ({"offers": [{"name": "free"}]}, "usd_per_h of the offer free must be more than 0"),
        ({"offers": [OFFER], "run": {"mode": "sync"}}, '[[offers]] need run.mode = "echo2"'),
    ],
)  # fmt: skip
def test_what_cannot_be_played_is_told_with_what_to_change(changes: dict[str, Any], sentence: str) -> None:
    (fault,) = faults(**changes)
    assert fault.startswith(sentence), fault


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"at_s": None}, "events.0 must have one of at_s and at_step, got neither"),
        ({"at_step": 3}, "events.0 must have one of at_s and at_step, got both"),
        ({"at_s": -1.0}, "events.0.at_s must be at least 0, got -1.0"),
        ({"what": "explode"},
         'events.0.what must be one of "kill", "preempt", "slow", "cut" or "price", got "explode"'),
        ({"what": None}, "events.0.what must be given"),
        ({"who": "crad-*"},
         'events.0.who must match "learner", "coordinator" or a worker, got "crad-*"; there are card-1'),
        ({"what": "cut"}, "events.0 must have a for_s above 0"),
        ({"what": "price", "who": "rented"}, "events.0 must have a usd_per_h above 0"),
        ({"what": "price", "usd_per_h": 1.0}, 'events.0.who must match an offer, got "card-*"; there are rented'),
        ({"factor": 3.0}, 'events.0 must not have factor: what = "kill" does not read it'),
        ({"what": "preempt", "for_s": 3.0}, 'events.0 must not have for_s: what = "preempt" does not read it'),
        ({"what": "preempt", "who": "learner"},
         'events.0.what must be "kill" or "slow" or "cut" where it befalls the learner, got "preempt"'),
        ({"what": "slow", "who": "coordinator"},
         'events.0.what must be "kill" where it befalls the coordinator, got "slow"'),
    ],
)  # fmt: skip
def test_an_event_that_cannot_come_to_pass_is_told(keys: dict[str, Any], sentence: str) -> None:
    made = [{key: value for key, value in each.items() if value is not None} for each in event(**keys)]
    (fault,) = faults(events=made, offers=[OFFER])
    assert fault.startswith(sentence), fault


def test_all_faults_are_told_at_once() -> None:
    found = faults(
        "run.stps=3", workers=[{"name": "a", "loss": 2.0, "usd_per_h": -1.0}], world={"sed": 1}, events=[{"at_s": "x"}]
    )
    assert len(found) == 6


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\xff\xfe[run]", "must be UTF-8 text"),
        (b"[run", "must be valid TOML"),
        (b"a = " + b"[" * 20_000, "recursion"),
        (b"a = " + b"9" * 5_000, "integer string conversion"),
        (b"#" * (1 << 20) + b"#", "below 1 MiB"),
        (b'config = "absent.toml"', "absent.toml must exist"),
        (b'config = "."', "must be a readable file"),
        (b'config = "a\\u0000b"', "embedded null byte"),
        (b"config = 3", "config must be the path of a run's configuration"),
        (b'config = ""', "config must be the path of a run's configuration"),
    ],
)
def test_a_file_that_cannot_be_read_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "scenario.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_scenario(path)


# ---- what no pool can do ---------------------------------------------------------------------------------------------


def test_an_overlap_that_no_pool_can_reach_is_told_with_ways_out_that_work() -> None:
    made = {"rehearsal": {"snapshot_bytes": 100_000_000_000}}
    why = scenario(**made).impossible()
    assert "T_bcast must be at most kappa * T_train, got 81.5 s against 2 * 30 s = 60 s" in why
    assert "set S to 6 and kappa to 3" in why
    assert scenario("staleness.budget=6", "staleness.publish_period=3", **made).impossible() == ""
    assert scenario("world.uplink_mbps=1000", "world.delta_share=0.001", **made).impossible() == ""
    assert scenario("run.mode=sync", **made).impossible() == "", "a baseline waits by its nature"


@pytest.mark.parametrize("base", [SMALL, DISTURBED])
def test_what_can_be_played_is_not_called_impossible(base: dict[str, Any]) -> None:
    assert scenario(base=base).impossible() == ""

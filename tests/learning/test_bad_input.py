"""What must not pass for training: each ends as a sentence, a counter or nothing at all, and poisons nothing."""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_jobs import write
from safetensors.torch import load_file, save_file
from torch import Tensor
from trajectories import batch_of, learning_config, policy_of, saved, some_batch, tiny_gpt2, tiny_qwen3, trajectory

from echo2.config.root import Config
from echo2.errors import IntegrityError, UserError
from echo2.learning.learner import TorchLearner
from echo2.learning.loading import load_causal_lm
from echo2.learning.objectives import OBJECTIVES
from echo2.learning.warm_start import warm_start
from echo2.types import FinishReason


def open_learner(config: Config, run_dir: Path, *, resume: bool = False) -> TorchLearner:
    return TorchLearner.open(config, run_dir, "run-1", resume=resume, write_snapshot=write)


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner._policy.model.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return learning_config(saved(tiny_qwen3(), tmp_path / "model"), grad_clip=0.0)


async def left_behind(config: Config, run_dir: Path) -> Path:
    """The checkpoint of a run's step 1."""
    learner = open_learner(config, run_dir)
    await learner.save_checkpoint()
    await learner.train_step(some_batch())
    await learner.save_checkpoint()
    return run_dir / "checkpoints" / "step-00000001"


def moments(learner: TorchLearner) -> dict[str, Tensor]:
    """Of Adam, its step counters among them."""
    frozen = learner._freeze().optimizer
    return {name: value.clone() for name, value in frozen.items() if not name.startswith("rng")}


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("file", ["weights.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
async def test_a_torn_checkpoint_is_named_and_the_one_before_it_is_in_force(
    file: str, damage: str, config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = await left_behind(config, tmp_path / "run") / file
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-7])
    else:
        path.unlink()
    with caplog.at_level(logging.WARNING):
        learner = open_learner(config, tmp_path / "run", resume=True)
    assert learner.step == 0
    assert "step-00000001 is no whole checkpoint" in caplog.text


async def test_a_flipped_bit_in_a_checkpoint_is_refused(config: Config, tmp_path: Path) -> None:
    path = await left_behind(config, tmp_path / "run") / "weights.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 4
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"weights\.safetensors must be as it was written"):
        open_learner(config, tmp_path / "run", resume=True)


async def test_a_checkpoint_whose_weights_are_no_numbers_is_refused(config: Config, tmp_path: Path) -> None:
    """As another program, or an older version of this one, may have left it."""
    folder = await left_behind(config, tmp_path / "run")
    held = load_file(folder / "weights.safetensors")
    held["model.norm.weight"][0] = math.nan
    save_file(held, folder / "weights.safetensors")
    size = (folder / "weights.safetensors").stat().st_size
    changed(
        folder / "COMPLETE.json", lambda sizes: (sizes.pop("digests.json"), sizes.update({"weights.safetensors": size}))
    )  # type: ignore[func-returns-value]
    (folder / "digests.json").unlink()
    with pytest.raises(UserError, match=r"model\.norm\.weight is not: remove .*step-00000001 for an older one"):
        open_learner(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "was trained with, and it differs"),
        ({"vocab_size": 40}, "was trained with, and it differs"),
        ({"rope_theta": 77.0}, "was trained with, and it differs"),
    ],
)
async def test_a_model_whose_configuration_was_replaced_is_refused(
    change: dict[str, Any], sentence: str, config: Config, tmp_path: Path
) -> None:
    """Even where every weight still has its shape: under other settings they mean something else."""
    await left_behind(config, tmp_path / "run")
    changed(tmp_path / "model" / "config.json", lambda content: content.update(change))
    with pytest.raises(IntegrityError, match=sentence):
        open_learner(config, tmp_path / "run", resume=True)


async def test_tensors_of_another_model_are_refused_where_a_checkpoint_names_no_configuration(
    config: Config, tmp_path: Path
) -> None:
    state = await left_behind(config, tmp_path / "run") / "state.json"
    changed(state, lambda content: content.pop("model_digest"))
    changed(state.with_name("COMPLETE.json"), lambda sizes: sizes.update({"state.json": state.stat().st_size}))
    assert open_learner(config, tmp_path / "run", resume=True).step == 1
    other = learning_config(saved(tiny_qwen3(tied=False), tmp_path / "other"))
    with pytest.raises(IntegrityError, match=r"'lm_head\.weight' is on one side only"):
        open_learner(other, tmp_path / "run", resume=True)


async def test_what_other_versions_of_transformers_write_makes_no_other_model(config: Config, tmp_path: Path) -> None:
    await left_behind(config, tmp_path / "run")
    changed(tmp_path / "model" / "config.json", lambda content: content.update(transformers_version="9", dtype="x32"))
    changed(tmp_path / "model" / "config.json", lambda content: content.pop("dtype"))
    assert open_learner(config, tmp_path / "run", resume=True).step == 1


async def test_weights_of_a_replaced_model_directory_do_not_reach_the_run(config: Config, tmp_path: Path) -> None:
    before = weights(open_learner(config, tmp_path / "other"))
    await left_behind(config, tmp_path / "run")
    resumed = weights(open_learner(config, tmp_path / "run", resume=True))
    shutil.rmtree(tmp_path / "model")
    saved(tiny_qwen3(seed=1), tmp_path / "model")
    assert same(weights(open_learner(config, tmp_path / "run", resume=True)), resumed)
    assert not same(before, resumed)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "all weights of the GPT2LMHeadModel"),
        ({"num_hidden_layers": 3}, r"missing, model\.layers\.2"),
        ({"vocab_size": 40}, "must load as a causal language model"),
    ],
)
def test_weights_that_a_model_lacks_are_not_filled_in_by_chance(
    change: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    folder = saved(tiny_qwen3(), tmp_path / "model")
    changed(folder / "config.json", lambda content: content.update(change, layer_types=None))
    with pytest.raises(UserError, match=sentence):
        load_causal_lm(folder, torch.device("cpu"))


def test_tensors_that_no_layer_of_the_model_takes_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = saved(tiny_qwen3(), tmp_path / "model")
    changed(folder / "config.json", lambda content: content.update(num_hidden_layers=1, layer_types=None))
    with caplog.at_level(logging.WARNING):
        load_causal_lm(folder, torch.device("cpu"))
    assert "are left out: model.layers.1" in caplog.text


async def test_a_model_whose_weights_are_no_numbers_is_refused(config: Config, tmp_path: Path) -> None:
    held = load_file(tmp_path / "model" / "model.safetensors")
    held["model.norm.weight"][3] = math.inf
    save_file(held, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"of model\.path must be finite numbers, and model\.norm\.weight is not: copy"):
        open_learner(config, tmp_path / "run")


HOSTILE: dict[str, dict[str, Any]] = {
    "a reward that is NaN": {"reward": math.nan},
    "a reward that is infinite": {"reward": -math.inf},
    "a log-prob of -inf": {"logprobs": [-math.inf, -1.0]},
    "a log-prob of NaN": {"logprobs": [math.nan, -1.0]},
    "a log-prob above 0": {"logprobs": [3.0, 4e38]},
    "a log-prob of -1e30": {"logprobs": [-1e30, -1.0]},
    "a log-ratio of a thousand": {"logprobs": [-8999.0, -8999.0]},
    "a log-ratio far below": {"logprobs": [0.0, 0.0]},
    "a huge reward": {"reward": 1e9},
    "a temperature next to nothing": {"temperature": 1e-30},
}


@pytest.mark.parametrize("objective", sorted(OBJECTIVES))
async def test_no_record_makes_weights_or_optimizer_anything_but_numbers(
    objective: str, config: Config, tmp_path: Path
) -> None:
    """Under any objective, without clipping: the update is as finite as ever, or skipped and counted."""
    learning = config.learning.model_copy(update={"objective": objective, "updates_per_step": 1})
    learner = open_learner(config.model_copy(update={"learning": learning}), tmp_path / "run")
    others = [trajectory([1, 2], [7 + i, 8], float(i), logprobs=[-1.0, -2.0]) for i in range(2)]
    for step, (name, fields) in enumerate(HOSTILE.items()):
        given = {"reward": 1.0, "logprobs": [-1.0, -2.0], "version": 0} | fields
        rows = [trajectory([1, 2], [3, 4], **given), trajectory([1, 2], [5, 6], 0.0, logprobs=[-1.0, -2.0])]
        statistics = await learner.train_step(batch_of({0: rows, 1: others}, step))
        assert all(math.isfinite(value) for value in statistics.values()), (name, statistics)
        held = {**weights(learner), **moments(learner)}
        assert all(bool(torch.isfinite(value).all()) for value in held.values()), name


async def test_ratios_beyond_all_bounds_are_counted(config: Config, tmp_path: Path) -> None:
    rows = [trajectory([1, 2], [3, 4], float(i), logprobs=[-500.0, -1.0]) for i in range(2)]
    statistics = await open_learner(config, tmp_path / "run").train_step(batch_of({0: rows}))
    assert statistics["far_tokens"] == 2


async def test_an_update_that_is_skipped_leaves_the_optimizer_and_its_counters_alone(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learning = config.learning.model_copy(update={"advantage_scale": "none"})
    learner = open_learner(config.model_copy(update={"learning": learning}), tmp_path / "run")
    await learner.train_step(some_batch())
    before = weights(learner) | moments(learner)
    assert {float(v) for k, v in before.items() if k.endswith("/step")} == {2.0}
    endless = [trajectory([1, 2], [3 + i], 1e308 * (-1) ** i, logprobs=[-1.0]) for i in range(2)]
    with caplog.at_level(logging.WARNING):
        statistics = await learner.train_step(batch_of({0: endless}, 1))
    assert statistics["updates_not_finite"] == 1
    assert same(before, weights(learner) | moments(learner))
    assert "was not finite and was skipped" in caplog.text


@pytest.mark.parametrize("why", ["masked", "aged", "cut"])
async def test_a_batch_of_which_nothing_is_left_to_train_on_changes_no_bit(
    why: str, config: Config, tmp_path: Path
) -> None:
    filters = {"masked": {"zero_variance": "drop"}, "aged": {"max_age_steps": 0}, "cut": {"overlong": "mask"}}[why]
    learning = config.learning.model_copy(update=filters)
    learner = open_learner(config.model_copy(update={"learning": learning}), tmp_path / "run")
    await learner.train_step(some_batch())
    before = weights(learner) | moments(learner)
    version, reason = (0 if why == "aged" else 1), FinishReason.LENGTH if why == "cut" else FinishReason.STOP
    rows = [
        trajectory(
            [1, 2], [3 + i], 0.0 if why == "masked" else float(i), logprobs=[-1.0], version=version,
            finish_reason=reason,
        )
        for i in range(3)
    ]  # fmt: skip
    statistics = await learner.train_step(batch_of({0: rows}, 1))
    assert statistics["trainable_tokens"] == 0
    assert statistics["updates_empty"] == 2
    assert same(before, weights(learner) | moments(learner))


async def test_weights_that_a_learning_rate_made_infinite_never_leave_the_step(config: Config, tmp_path: Path) -> None:
    learning = config.learning.model_copy(update={"lr": 1e38})
    learner = open_learner(config.model_copy(update={"learning": learning}), tmp_path / "run")
    await learner.save_checkpoint()
    with pytest.raises(UserError, match=r"after step 0 must be finite.* lower learning\.lr, which is 1e\+38"):
        await learner.train_step(some_batch())
    again = open_learner(config, tmp_path / "run", resume=True)
    assert again.step == 0
    assert all(bool(torch.isfinite(value).all()) for value in weights(again).values())


def test_a_warm_start_that_breaks_down_says_what_to_lower(tmp_path: Path) -> None:
    talks = [[([1, 2], [3, 4])]]
    with pytest.raises(UserError, match=r"lower model\.warm_start_lr"):
        warm_start(policy_of(tiny_gpt2()), lambda _: talks, steps=4, lr=1e30, micro_batch_tokens=64)


async def test_weights_beyond_the_snapshots_type_are_not_published_as_infinite(tmp_path: Path) -> None:
    model = tiny_qwen3()
    with torch.no_grad():
        model.model.norm.weight[0] = 1e5
    config = learning_config(saved(model, tmp_path / "model"))
    section = config.model.model_copy(update={"snapshot_dtype": "float16"})
    learner = open_learner(config.model_copy(update={"model": section}), tmp_path / "run")
    with pytest.raises(UserError, match=r"at most 6\.55e\+04 for .* float16, and model\.norm\.weight"):
        await learner.write_snapshot(0)
    assert not list((tmp_path / "run").glob("**/manifest.json"))

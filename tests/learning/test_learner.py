from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trajectories import batch_of, learning_config, saved, some_batch, tiny_qwen3, trajectory

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.config.root import Config
from echo2.errors import DiskFull, IntegrityError, UserError
from echo2.learning import checkpoint, update
from echo2.learning.learner import TorchLearner
from echo2.learning.loading import load_causal_lm
from echo2.types import Policy


def write(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
    aliases: Mapping[str, str],
    **rest: Any,
) -> Manifest:
    return write_snapshot({name: StreamedTensor(*tensor) for name, tensor in tensors.items()}, aliases, **rest)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_qwen3(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir: Path) -> Config:
    return learning_config(model_dir)


def open_learner(config: Config, run_dir: Path, *, resume: bool = False, **more: Any) -> TorchLearner:
    return TorchLearner.open(config, run_dir, "run-1", resume=resume, write_snapshot=write, **more)


def weights(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner._policy.model.state_dict().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


async def test_a_step_changes_the_weights_and_tells_what_happened(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    before = weights(learner)
    statistics = await learner.train_step(some_batch())
    assert (learner.step, learner.last_batch_digest) == (1, "digest-0")
    assert not same(before, weights(learner))
    assert statistics["ratio_first"] == pytest.approx(1.0, abs=1e-3)
    assert statistics["trainable_tokens"] == 4 * (2 + 3 + 4)
    assert statistics["lr"] == 1e-2
    assert all(math.isfinite(value) for value in statistics.values())
    expected = {"loss", "kl", "entropy", "clip_share", "ratio_mean", "weight_mean", "grad_norm", "step_s", "prox_s"}
    assert expected <= statistics.keys()


async def test_a_batch_out_of_turn_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="next batch must be 0, got batch 1"):
        await open_learner(config, tmp_path).train_step(some_batch(step=1))


@pytest.mark.parametrize("tied", [True, False])
async def test_a_resumed_learner_has_the_bits_of_one_that_was_never_interrupted(tied: bool, tmp_path: Path) -> None:
    config = learning_config(saved(tiny_qwen3(tied=tied), tmp_path / "model"), weight_decay=0.1)
    straight = open_learner(config, tmp_path / "straight")
    for step in range(4):
        await straight.train_step(some_batch(step))
    first = open_learner(config, tmp_path / "run")
    for step in range(2):
        await first.train_step(some_batch(step))
    await first.save_checkpoint()
    await first.train_step(some_batch(2))
    second = open_learner(config, tmp_path / "run", resume=True)
    assert (second.step, second.last_batch_digest) == (2, "digest-1")
    assert second.initial_weights_hash == straight.initial_weights_hash
    for step in (2, 3):
        await second.train_step(some_batch(step))
    assert same(weights(second), weights(straight))
    assert same((await second.freeze()).optimizer, (await straight.freeze()).optimizer)


async def test_two_processes_begin_a_run_of_one_seed_in_the_same_random_state(config: Config, tmp_path: Path) -> None:
    states = []
    for process in range(2):
        torch.manual_seed(process)  # what a process happens to come with
        states.append((await open_learner(config, tmp_path / str(process)).freeze()).optimizer)
    assert same(*states)


async def test_a_crash_before_the_first_checkpoint_begins_again(config: Config, tmp_path: Path) -> None:
    assert open_learner(config, tmp_path, resume=True).step == 0


async def test_a_run_folder_with_checkpoints_is_not_begun_again_by_mistake(config: Config, tmp_path: Path) -> None:
    await open_learner(config, tmp_path).save_checkpoint()
    with pytest.raises(UserError, match="pass --resume"):
        open_learner(config, tmp_path)


async def test_checkpoints_of_another_run_or_model_are_refused(config: Config, tmp_path: Path) -> None:
    await open_learner(config, tmp_path).save_checkpoint()
    with pytest.raises(UserError, match="of run run-2, they are of run run-1"):
        TorchLearner.open(config, tmp_path, "run-2", resume=True, write_snapshot=write)
    other = learning_config(saved(tiny_qwen3(tied=False), tmp_path / "other"))
    with pytest.raises(IntegrityError, match=r"other/config\.json must be the one"):
        open_learner(other, tmp_path, resume=True)


async def test_only_the_newest_checkpoints_are_kept(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    for step in range(3):
        await learner.train_step(some_batch(step))
        await learner.save_checkpoint()
    assert checkpoint.complete_steps(tmp_path / "checkpoints") == [2, 3]


@pytest.mark.parametrize("tied", [True, False])
async def test_e01_a_published_snapshot_gives_the_learners_logits(tied: bool, tmp_path: Path) -> None:
    folder = saved(tiny_qwen3(tied=tied), tmp_path / "model")
    config = learning_config(folder).model_copy(
        update={"model": learning_config(folder).model.model_copy(update={"snapshot_dtype": "float32"})}
    )
    learner = open_learner(config, tmp_path)
    await learner.train_step(some_batch())
    manifest, snapshot = await learner.write_snapshot(3)
    assert manifest.policy == Policy(3, 1)
    assert manifest.aliases == ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})
    worker = load_causal_lm(folder, torch.device("cpu"))
    stored = load_file(snapshot / "model.safetensors")
    worker.load_state_dict(stored | {name: stored[origin] for name, origin in manifest.aliases.items()})
    tokens = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        assert torch.equal(worker(tokens).logits, learner._policy.model(tokens).logits)


async def test_e12_snapshots_have_the_configured_type_and_the_learner_keeps_float32(
    config: Config, tmp_path: Path
) -> None:
    learner = open_learner(config, tmp_path)
    manifest, _ = await learner.write_snapshot(0)
    assert manifest.dtype == "bfloat16"
    assert {tensor.dtype for tensor in manifest.tensors} == {"BF16"}
    assert {value.dtype for value in weights(learner).values()} == {torch.float32}


async def test_a_frozen_step_is_saved_and_published_as_it_was_beside_the_next_step(
    config: Config, tmp_path: Path
) -> None:
    learner = open_learner(config, tmp_path)
    await learner.train_step(some_batch())
    at_one = weights(learner)
    frozen = await learner.freeze()
    _, _, (manifest, _) = await asyncio.gather(
        learner.train_step(some_batch(1)), learner.save_checkpoint(frozen), learner.write_snapshot(0, frozen)
    )
    assert manifest.policy == Policy(0, 1)
    assert learner.step == 2
    resumed = open_learner(config, tmp_path, resume=True)
    assert resumed.step == 1
    assert same(weights(resumed), at_one)


async def test_training_goes_on_while_neither_checkpoint_nor_snapshot_can_be_written(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the copy to host memory is between two steps: encoding, hashing and writing are beside them."""
    go_on = threading.Event()
    learner = open_learner(config, tmp_path)
    await learner.train_step(some_batch())
    at_one = weights(learner)
    real = learner._writer

    def held(*given: Any, **named: Any) -> Any:
        assert go_on.wait(20)
        return real(*given, **named)

    learner._writer = held
    write_all = checkpoint.write_all
    monkeypatch.setattr(checkpoint, "write_all", lambda *given: go_on.wait(20) and write_all(*given))
    frozen = await learner.freeze()
    async with asyncio.timeout(20), asyncio.TaskGroup() as beside:
        saving = beside.create_task(learner.save_checkpoint(frozen))
        writing = beside.create_task(learner.write_snapshot(0, frozen))
        for step in (1, 2):
            await learner.train_step(some_batch(step))
        assert not saving.done() and not writing.done()
        go_on.set()
    assert learner.step == 3
    resumed = open_learner(config, tmp_path, resume=True)
    assert resumed.step == 1
    assert same(weights(resumed), at_one)


async def test_weights_cannot_be_frozen_inside_a_step(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = open_learner(config, tmp_path)
    inside, go_on = threading.Event(), threading.Event()
    real = update._prepare

    def held(*given: Any) -> Any:
        inside.set()
        assert go_on.wait(20)
        return real(*given)

    monkeypatch.setattr(update, "_prepare", held)
    async with asyncio.timeout(20), asyncio.TaskGroup() as group:
        group.create_task(learner.train_step(some_batch()))
        await asyncio.to_thread(inside.wait, 20)
        with pytest.raises(RuntimeError, match="between two steps"):
            await learner.save_checkpoint()
        go_on.set()
    assert learner.step == 1


async def test_a_frozen_copys_memory_is_used_again_and_never_under_its_holder(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    first = await learner.freeze()
    place = first.weights["model.norm.weight"].data_ptr()
    second = await learner.freeze()
    assert second.weights["model.norm.weight"].data_ptr() != place
    del first
    third = await learner.freeze()
    assert third.weights["model.norm.weight"].data_ptr() == place


async def test_b08_c05_a_batch_without_loss_bearing_tokens_warns_and_changes_no_bit(
    config: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    learner = open_learner(config, tmp_path)
    await learner.train_step(some_batch())  # so that the optimizer has momentum to drift with
    before = weights(learner)
    silent = batch_of({0: [trajectory([1, 2], []), trajectory([1, 2], [])]}, 1)
    with caplog.at_level(logging.WARNING):
        statistics = await learner.train_step(silent)
    assert "no token carries loss" in caplog.text
    assert statistics["trainable_tokens"] == 0
    assert same(before, weights(learner))
    assert learner.step == 2


async def test_a_reward_that_is_not_a_number_is_left_out_and_counted(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    good = [trajectory([1, 2], [3 + i], float(i)) for i in range(3)]
    statistics = await learner.train_step(batch_of({0: [*good, trajectory([1, 2], [9], math.nan)]}))
    assert statistics["unusable_rows"] == 1
    assert all(torch.isfinite(value).all() for value in weights(learner).values())


async def test_the_warm_start_makes_version_0_and_the_reference_of_a_resumed_run(
    model_dir: Path, tmp_path: Path
) -> None:
    plain = learning_config(model_dir, kl_beta=0.1)
    config = plain.model_copy(update={"model": plain.model.model_copy(update={"warm_start_steps": 2})})

    def gold(_: int) -> list[list[tuple[list[int], list[int]]]]:
        return [[([1, 2], [3, 4])]]

    learner = open_learner(config, tmp_path, gold=gold)
    version_0 = weights(learner)
    assert learner.initial_weights_hash != open_learner(plain, tmp_path / "plain").initial_weights_hash
    await learner.train_step(some_batch())
    await learner.save_checkpoint()
    resumed = open_learner(config, tmp_path, resume=True)
    assert resumed._reference is not None
    assert same(dict(resumed._reference.model.state_dict()), version_0)
    with pytest.raises(UserError, match="needs tasks with gold replies"):
        open_learner(config, tmp_path / "again")


async def test_a_reference_that_is_not_version_0_is_refused(model_dir: Path, tmp_path: Path) -> None:
    config = learning_config(saved(tiny_qwen3(), tmp_path / "model"), kl_beta=0.1)
    await open_learner(config, tmp_path).save_checkpoint()
    saved(tiny_qwen3(seed=9), tmp_path / "model")
    with pytest.raises(IntegrityError, match="must be version 0 of this run"):
        open_learner(config, tmp_path, resume=True)


async def test_a_damaged_reference_is_named_in_one_sentence(model_dir: Path, tmp_path: Path) -> None:
    config = learning_config(model_dir, kl_beta=0.1)
    await open_learner(config, tmp_path).save_checkpoint()
    (tmp_path / "checkpoints" / "initial.safetensors").write_bytes(b"cut")
    with pytest.raises(IntegrityError, match=r"initial\.safetensors, the reference .*: bring the file back, or set"):
        open_learner(config, tmp_path, resume=True)


async def test_changed_settings_are_reported_on_resume(
    config: Config, model_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await open_learner(config, tmp_path).save_checkpoint()
    with caplog.at_level(logging.WARNING):
        open_learner(learning_config(model_dir, lr=1e-3), tmp_path, resume=True)
    assert "settings differ" in caplog.text


async def test_e07_a_full_disk_is_an_error_that_a_later_attempt_survives(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = open_learner(config, tmp_path)
    await learner.save_checkpoint()
    await learner.train_step(some_batch())
    frozen = await learner.freeze()

    def full(*_: Any) -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(checkpoint, "write_safetensors", full)
    with pytest.raises(DiskFull):
        await learner.save_checkpoint(frozen)
    monkeypatch.undo()
    assert checkpoint.complete_steps(tmp_path / "checkpoints") == [0]
    await learner.save_checkpoint(frozen)
    assert checkpoint.complete_steps(tmp_path / "checkpoints") == [0, 1]


async def test_old_snapshot_folders_are_forgotten_by_policy_order(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    for incarnation in (0, 1, 2):
        _, folder = await learner.write_snapshot(incarnation)
    (folder.parent / "notes").mkdir()
    await learner.discard_snapshots(2)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["1.0", "2.0", "notes"]
    await learner.discard_snapshots(2)

"""Adapters beside frozen weights: what is trained, kept, published and refused."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from trajectories import learning_config, saved, some_batch, tiny_qwen3

from echo2.broadcast.snapshot import verify_snapshot
from echo2.broadcast.unpack import unpack
from echo2.config.lora import LoraSection
from echo2.config.root import Config
from echo2.errors import IntegrityError, UserError
from echo2.learner.adapters import AdapterSnapshots
from echo2.learning.adapters import AdaptedModel, BaseOf, adapt
from echo2.learning.learner import TorchLearner
from echo2.learning.loading import load_causal_lm
from echo2.learning.packing import pack
from echo2.learning.policy_model import PolicyModel, _probe_rows
from echo2.transport.partial import OBJECT_NAME
from echo2.types import Policy, SnapshotKind

RANK, ALPHA = 2, 8.0
ATTENTION = ("q_proj", "v_proj")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_qwen3(), tmp_path_factory.mktemp("model"))


@pytest.fixture
def config(model_dir: Path) -> Config:
    return lora_config(model_dir)


def lora_config(model_dir: Path, targets: tuple[str, ...] = ATTENTION, **learning: Any) -> Config:
    config = learning_config(model_dir, **learning)
    return config.model_copy(
        update={
            "lora": LoraSection(rank=RANK, alpha=ALPHA, targets=targets),
            "model": config.model.model_copy(update={"snapshot_dtype": "float32"}),
        }
    )


def snapshots(config: Config, run_dir: Path) -> AdapterSnapshots:
    return AdapterSnapshots(run_dir / "learner" / "base", "run-1", config.model.snapshot_dtype, config.lora.alpha)


def open_learner(config: Config, run_dir: Path, *, resume: bool = False, **more: Any) -> TorchLearner:
    writer = snapshots(config, run_dir)
    return TorchLearner.open(
        config, run_dir, "run-1", resume=resume, write_snapshot=writer, keep_base=writer.keep_base, **more
    )


def state(learner: TorchLearner) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in learner._policy.model.state_dict().items()}


def adapted(model_dir: Path) -> AdaptedModel:
    """With adapters that change something."""
    model = load_causal_lm(model_dir, torch.device("cpu"))
    adapt(model, LoraSection(rank=RANK, alpha=ALPHA), seed=0)
    policy = AdaptedModel(model, compute_dtype="float32", logits_chunk_tokens=0)
    with torch.no_grad():
        for name, value in policy.parameters().items():
            if ".lora_B." in name:
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
    return policy


async def test_a_step_changes_adapters_and_leaves_every_byte_of_the_base(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    before = state(learner)
    statistics = await learner.train_step(some_batch())
    changed = {name for name, value in state(learner).items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".lora_" in name for name in changed)
    assert statistics["ratio_first"] == pytest.approx(1.0, abs=1e-3)
    assert {parameter for group in learner._optimizer.param_groups for parameter in group["params"]} == set(
        learner._policy.parameters().values()
    )


async def test_a_checkpoint_holds_adapters_and_their_moments_and_nothing_of_the_base(
    config: Config, model_dir: Path, tmp_path: Path
) -> None:
    learner = open_learner(config, tmp_path)
    await learner.train_step(some_batch())
    await learner.save_checkpoint()
    folder = tmp_path / "checkpoints" / "step-00000001"
    layers = learner._policy.model.config.num_hidden_layers
    names = {
        f"base_model.model.model.layers.{layer}.self_attn.{target}.lora_{side}.weight"
        for layer in range(layers) for target in ATTENTION for side in "AB"
    }  # fmt: skip
    assert load_file(folder / "weights.safetensors").keys() == names
    moments = {f"{name}/{moment}" for name in names for moment in ("exp_avg", "exp_avg_sq", "step")}
    assert load_file(folder / "optimizer.safetensors").keys() - {"rng/cpu"} == moments


@pytest.mark.parametrize("checkpointing", [False, True])
async def test_a_resumed_learner_has_the_bits_of_one_that_was_never_interrupted(
    model_dir: Path, tmp_path: Path, checkpointing: bool
) -> None:
    config = lora_config(model_dir, weight_decay=0.1, kl_beta=0.05, activation_checkpointing=checkpointing)
    straight = open_learner(config, tmp_path / "straight")
    for step in range(4):
        await straight.train_step(some_batch(step))
    first = open_learner(config, tmp_path / "run")
    for step in range(2):
        await first.train_step(some_batch(step))
    await first.save_checkpoint()
    second = open_learner(config, tmp_path / "run", resume=True)
    assert second.initial_weights_hash == straight.initial_weights_hash
    for step in (2, 3):
        await second.train_step(some_batch(step))
    one, other = state(second), state(straight)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    moments = [(await learner.freeze()).optimizer for learner in (second, straight)]
    assert all(torch.equal(moments[0][name], moments[1][name]) for name in moments[1])


async def test_resuming_beside_other_weights_is_refused(config: Config, tmp_path: Path) -> None:
    await open_learner(config, tmp_path).save_checkpoint()
    model = tiny_qwen3()
    with torch.no_grad():
        model.model.norm.weight[0] += 1e-3
    other = lora_config(saved(model, tmp_path / "other"))
    with pytest.raises(IntegrityError, match="must be resumed on the weights that they were trained beside"):
        open_learner(other, tmp_path, resume=True)


async def test_a_checkpoint_of_adapters_does_not_resume_with_another_rank_or_with_all_weights(
    config: Config, tmp_path: Path
) -> None:
    await open_learner(config, tmp_path).save_checkpoint()
    wider = config.model_copy(update={"lora": config.lora.model_copy(update={"rank": RANK + 1})})
    with pytest.raises(IntegrityError, match="must have shape"):
        open_learner(wider, tmp_path, resume=True)
    whole = config.model_copy(update={"lora": LoraSection()})
    with pytest.raises(IntegrityError, match="is on one side only"):
        open_learner(whole, tmp_path, resume=True)


def test_the_reference_of_the_kl_term_is_version_0(model_dir: Path) -> None:
    policy = adapted(model_dir)
    plain = PolicyModel(load_causal_lm(model_dir, torch.device("cpu")), compute_dtype="float32", logits_chunk_tokens=0)
    (micro,) = pack(_probe_rows(plain.vocabulary), budget=1024, share_prefixes=False)
    with torch.no_grad():
        assert torch.equal(BaseOf(policy).logprobs(micro)[0], plain.logprobs(micro)[0])
        assert not torch.allclose(policy.logprobs(micro)[0], plain.logprobs(micro)[0], atol=1e-3)


async def test_a_published_version_is_the_policy_that_was_trained(config: Config, tmp_path: Path) -> None:
    every = config.model_copy(update={"lora": LoraSection(rank=RANK, alpha=ALPHA)})
    learner = open_learner(every, tmp_path)
    for step in range(3):
        await learner.train_step(some_batch(step))
    manifest, folder = await learner.write_snapshot(0)
    verify_snapshot(folder, manifest)
    merged = load_causal_lm(model_folder(config, folder, tmp_path), torch.device("cpu"))
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        ours = learner._policy.model(input_ids=tokens).logits
        theirs, base = merged(input_ids=tokens).logits, load_causal_lm(Path(config.model.path), torch.device("cpu"))
        assert float((ours - theirs).abs().max()) < 1e-5
        assert float((ours - base(input_ids=tokens).logits).abs().max()) > 1e-3


def model_folder(config: Config, snapshot: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "merged"
    folder.mkdir()
    (folder / "config.json").write_bytes((Path(config.model.path) / "config.json").read_bytes())
    (folder / OBJECT_NAME).write_bytes((snapshot / OBJECT_NAME).read_bytes())
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
async def test_adapters_alone_become_the_published_bytes_on_a_holder_of_version_0(
    config: Config, tmp_path: Path, dtype: str
) -> None:
    config = config.model_copy(update={"model": config.model.model_copy(update={"snapshot_dtype": dtype})})
    learner, packer = open_learner(config, tmp_path), snapshots(config, tmp_path)
    first, base = await learner.write_snapshot(0)
    assert await packer.delta(first, base) is None, "version 0 travels whole"
    await learner.train_step(some_batch())
    raw, folder = await learner.write_snapshot(0)
    sent = await packer.delta(raw, folder)
    assert sent is not None
    manifest, path = sent
    assert (manifest.kind, manifest.base, manifest.policy) == (SnapshotKind.DELTA, Policy(0, 0), Policy(0, 1))
    assert set(load_file(path)) == set(learner._policy.parameters()), "what PEFT would have stored"
    # [rank, 32] and [out, rank] for q and v of two layers, far below the whole.
    assert manifest.object_size < first.object_size / 3
    made = unpack(manifest, path, base, tmp_path / "worker")
    assert (tmp_path / "worker" / OBJECT_NAME).read_bytes() == (folder / OBJECT_NAME).read_bytes()
    assert made.decoded_root == raw.decoded_root


async def test_torn_adapters_and_another_base_are_refused(config: Config, tmp_path: Path) -> None:
    learner, packer = open_learner(config, tmp_path), snapshots(config, tmp_path)
    _, base = await learner.write_snapshot(0)
    await learner.train_step(some_batch())
    raw, folder = await learner.write_snapshot(0)
    sent = await packer.delta(raw, folder)
    assert sent is not None
    manifest, path = sent
    whole = path.read_bytes()
    torn = tmp_path / "torn"
    torn.write_bytes(whole[:-4])
    with pytest.raises(IntegrityError):
        unpack(manifest, torn, base, tmp_path / "worker")
    torn.write_bytes(whole[:-1] + bytes([whole[-1] ^ 0x40]))
    with pytest.raises(IntegrityError, match="did not become what the manifest says"):
        unpack(manifest, torn, base, tmp_path / "worker")
    with pytest.raises(IntegrityError, match=r"applies to 0\.0"):
        unpack(manifest, path, folder, tmp_path / "worker")
    assert not (tmp_path / "worker").exists()


async def test_a_learner_that_comes_back_publishes_the_same_adapters_of_the_same_base(
    config: Config, tmp_path: Path
) -> None:
    learner = open_learner(config, tmp_path)
    await learner.write_snapshot(3)
    await learner.train_step(some_batch())
    await learner.save_checkpoint()
    raw, folder = await learner.write_snapshot(3)
    told = [await snapshots(config, tmp_path).delta(raw, folder)]
    again = open_learner(config, tmp_path, resume=True)
    raw, folder = await again.write_snapshot(3)
    told.append(await snapshots(config, tmp_path).delta(raw, folder))
    assert told[0] == told[1] is not None
    assert told[0][0].base == Policy(3, 0)


async def test_two_versions_without_a_step_between_them_are_two_objects(config: Config, tmp_path: Path) -> None:
    learner, packer = open_learner(config, tmp_path), snapshots(config, tmp_path)
    silent = some_batch()
    roots = set()
    for step in range(2):
        await learner.train_step(msgspec.structs.replace(silent, step=step, rows=()))
        sent = await packer.delta(*await learner.write_snapshot(0))
        assert sent is not None
        roots.add(sent[0].object_root)
    assert len(roots) == 2, "else a worker that has the first is told that it has the second"


async def test_a_damaged_snapshot_of_version_0_is_made_again(config: Config, tmp_path: Path) -> None:
    learner = open_learner(config, tmp_path)
    await learner.save_checkpoint()
    path = tmp_path / "learner" / "base" / "0.0" / OBJECT_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    open_learner(config, tmp_path, resume=True)
    assert path.read_bytes() == whole


async def test_adapters_of_a_warm_start_stand_beside_what_it_left(config: Config, tmp_path: Path) -> None:
    warm = config.model.model_copy(update={"warm_start_steps": 2, "warm_start_lr": 1e-2})
    config = config.model_copy(update={"model": warm})
    learner = open_learner(config, tmp_path, gold=lambda step: [[([1, 2, 3], [4, 5])]])
    initial = load_file(tmp_path / "checkpoints" / "initial.safetensors")
    given = load_file(Path(config.model.path) / OBJECT_NAME)
    assert not torch.equal(initial["model.norm.weight"], given["model.norm.weight"])
    weights = learner._policy.weights()
    assert all(torch.equal(value, weights[name]) for name, value in initial.items() if name in weights)
    await learner.train_step(some_batch())
    await learner.save_checkpoint()
    again = open_learner(config, tmp_path, resume=True)
    assert again.initial_weights_hash == learner.initial_weights_hash
    one, other = state(again), state(learner)
    assert all(torch.equal(one[name], other[name]) for name in other)


async def test_an_audit_compares_with_the_merged_weights_and_changes_nothing(config: Config, tmp_path: Path) -> None:
    from echo2.learning.stand_in import standing_in

    learner = open_learner(config, tmp_path)
    for step in range(2):
        await learner.train_step(some_batch(step))
    _, folder = await learner.write_snapshot(0)
    policy, before = learner._policy, state(learner)
    (micro,) = pack(_probe_rows(policy.vocabulary), budget=1024, share_prefixes=False)
    with torch.no_grad():
        own = policy.logprobs(micro)[0]
        with standing_in(policy, folder):
            assert torch.allclose(policy.logprobs(micro)[0], own, atol=1e-5)
            assert torch.equal(policy.weights()["model.norm.weight"], before["model.norm.weight"])
        assert torch.equal(policy.logprobs(micro)[0], own)
    after = state(learner)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "q_prok", "norm"])
def test_targets_that_cannot_have_an_adapter_are_told_with_those_that_can(model_dir: Path, target: str) -> None:
    model = load_causal_lm(model_dir, torch.device("cpu"))
    with pytest.raises(UserError, match=rf"lora\.targets must name linear layers.*'{target}'.*q_proj"):
        adapt(model, LoraSection(rank=1, targets=("q_proj", target)), seed=0)


def test_a_missing_peft_is_one_sentence(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=r"peft is not installed; run: pip install 'echo2\[lora\]'"):
        adapt(load_causal_lm(model_dir, torch.device("cpu")), LoraSection(rank=1), seed=0)


def test_the_same_seed_gives_the_same_adapters_and_leaves_the_random_state(model_dir: Path) -> None:
    states = []
    for process in range(2):
        torch.manual_seed(process)
        model = load_causal_lm(model_dir, torch.device("cpu"))
        before = torch.get_rng_state()
        adapt(model, LoraSection(rank=2), seed=5)
        assert torch.equal(torch.get_rng_state(), before)
        states.append({name: value for name, value in model.state_dict().items() if "lora_A" in name})
    assert states[0] and all(torch.equal(states[0][name], states[1][name]) for name in states[0])

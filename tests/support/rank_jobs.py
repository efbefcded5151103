"""What one rank of a test does: ``python rank_jobs.py JOB FOLDER``, told who it is as by torchrun."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from short_memory import short_of_memory
from torch import Tensor
from trajectories import batch_of, some_batch, trajectory

from echo2.broadcast.manifest import Manifest
from echo2.broadcast.snapshot import StreamedTensor, write_snapshot
from echo2.config.root import Config
from echo2.errors import DiskFull, Echo2Error, IntegrityError, UserError
from echo2.learner.adapters import AdapterSnapshots
from echo2.learner.agreement import agree
from echo2.learning import policy_model
from echo2.learning.learner import TorchLearner
from echo2.learning.policy_model import own_rows
from echo2.learning.ranks import together
from echo2.learning.torch_ranks import Group, join_group, leave_group, lost_peer

STEPS = 20
MIDDLE = 10


def write(
    tensors: Mapping[str, tuple[str, tuple[int, ...], Callable[[], memoryview]]],
    aliases: Mapping[str, str],
    **rest: Any,
) -> Manifest:
    return write_snapshot({name: StreamedTensor(*tensor) for name, tensor in tensors.items()}, aliases, **rest)


def config_in(folder: Path) -> Config:
    return Config.model_validate_json((folder / "config.json").read_bytes())


def opened(folder: Path, run: str, group: Group | None, **more: Any) -> TorchLearner:
    config = config_in(folder)
    return TorchLearner.open(config, folder / run, "run-1", resume=True, write_snapshot=write, group=group, **more)


async def trained(learner: TorchLearner, end: int) -> list[list[float]]:
    """Loss, gradient norm and entropy of each step up to ``end``."""
    curve = []
    for step in range(learner.step, end):
        found = await learner.train_step(some_batch(step, groups=5))
        curve.append([found["loss"], found["grad_norm"], found["entropy"], found["trainable_tokens"]])
    return curve


async def published(learner: TorchLearner, group: Group | None) -> str:
    """Root of the snapshot of the current step, which rank 0 writes; empty on the others."""
    if group is not None and group.publishing.rank:
        await learner.serve_snapshot(await learner.freeze())
        return ""
    return (await learner.write_snapshot(0))[0].object_root


def own_bits(learner: TorchLearner) -> dict[str, Tensor]:
    frozen = learner._freeze()
    return {name: own_rows(value).clone() for name, value in {**frozen.weights, **frozen.optimizer}.items()}


async def two(folder: Path, group: Group) -> dict[str, Any]:
    """Twenty steps, with a checkpoint in the middle from which the second half is done again."""
    learner = opened(folder, "run", group)
    curve = await trained(learner, MIDDLE)
    await learner.save_checkpoint()
    curve += await trained(learner, STEPS)
    straight = own_bits(learner)
    again = opened(folder, "run", group)
    begun = again.step
    await trained(again, STEPS)
    resumed = own_bits(again)
    same = straight.keys() == resumed.keys() and all(torch.equal(straight[k], resumed[k]) for k in straight)
    told = group.steps.gather(json.dumps([begun, same]).encode())
    audit = await audited(again, group)
    root = await published(again, group)
    await again.save_checkpoint()
    awkward = await awkward_batches(again)
    faults = [fault(group, *case) for case in FAULTS]
    return {
        "curve": curve, "resumed": [json.loads(one) for one in told], "root": root, "audit": audit,
        "hash": again.initial_weights_hash, "awkward": awkward, "faults": faults, "differ": disagreement(folder, group),
        "stranger": stranger(folder, group), "half": await half(folder, group),
        "objectives": await by_objective(folder, group),
    }  # fmt: skip


async def audited(learner: TorchLearner, group: Group) -> list[Any]:
    """An audit of rows that name the snapshot written here; the weights are the same afterwards."""
    await published(learner, group)
    before = own_bits(learner)
    rows = await learner.audit(some_batch(learner.step, groups=5))
    after = own_bits(learner)
    assert all(torch.equal(before[name], after[name]) for name in before), "an audit changes nothing"
    return [[row.group_id, row.index, row.tokens if hasattr(row, "tokens") else list(row.bins)] for row in rows]


async def awkward_batches(learner: TorchLearner) -> list[list[float]]:
    """One group for several ranks; no loss at all; rewards that make the gradient not finite."""
    found = []
    one = [trajectory([1, 2, 3], [4 + i], float(i), logprobs=[-1.0]) for i in range(2)]
    silent = [trajectory([1, 2], []), trajectory([1, 2], [])]
    endless = [trajectory([1, 2], [3 + i], 1e308 * (-1) ** i, logprobs=[-1.0]) for i in range(2)]
    learner._rules = replace(learner._rules, advantage_scale="none")
    for rows in (one, silent, endless):
        before = own_bits(learner)
        told = await learner.train_step(batch_of({0: rows}, learner.step))
        after = own_bits(learner)
        changed = any(not torch.equal(before[k], after[k]) for k in before if not k.startswith("rng"))
        found.append([told["updates"], told["updates_empty"], told["updates_not_finite"], float(changed)])
    return found


FAULTS: tuple[tuple[int, type[Echo2Error]], ...] = ((0, DiskFull), (1, UserError), (1, IntegrityError))


def fault(group: Group, rank: int, kind: type[Echo2Error]) -> list[str]:
    """What every rank raises when one of them fails."""

    def work() -> None:
        if group.steps.rank == rank:
            raise kind("the disk is gone")

    try:
        together(group.steps, work)
    except Echo2Error as error:
        own = f"{type(error).__name__}: {error}"
    return [one.decode() for one in group.steps.gather(own.encode())]


WHOLE_UPDATE = ("dr_grpo", "gspo", "gepo", "m2po")
"""Objectives whose normaliser or statistics are of the whole update."""


async def by_objective(folder: Path, group: Group | None) -> dict[str, list[list[float]]]:
    config, curves = config_in(folder), {}
    for name in WHOLE_UPDATE:
        learning = config.learning.model_copy(update={"objective": name, "updates_per_step": 2})
        given = config.model_copy(update={"learning": learning})
        place = folder / f"{name}-{1 if group is None else group.steps.world}"
        learner = TorchLearner.open(given, place, "r", resume=True, write_snapshot=write, group=group)
        curves[name] = await trained(learner, 2)
    return curves


async def half(folder: Path, group: Group) -> dict[str, Any]:
    """A step in bfloat16, whatever this processor makes of it, beside the same in float32."""
    config, losses = config_in(folder), {}
    policy_model._supported = lambda name, _: getattr(torch, name)
    for dtype in ("float32", "bfloat16"):
        learning = config.learning.model_copy(update={"compute_dtype": dtype, "kl_beta": 0.0})
        given = config.model_copy(update={"learning": learning})
        learner = TorchLearner.open(given, folder / dtype, "r", resume=True, write_snapshot=write, group=group)
        losses[dtype] = (await trained(learner, 2))[-1][:3]
        masters = {str(value.dtype) for value in learner._policy.parameters().values()}
        losses[f"{dtype} passes"] = str(learner._policy.compute_dtype)
    return {**losses, "masters": sorted(masters)}


def stranger(folder: Path, group: Group) -> list[str]:
    """What ranks say whose model is not the checkpoint's."""
    config = config_in(folder)
    other = config.model_copy(
        update={
            "model": config.model.model_copy(update={"path": str(folder / "other")}),
            "learning": config.learning.model_copy(update={"kl_beta": 0.0}),
        }
    )
    try:
        TorchLearner.open(other, folder / "run", "run-1", resume=True, write_snapshot=write, group=group)
    except IntegrityError as error:
        own = str(error)
    return [one.decode() for one in group.steps.gather(own.encode())]


def disagreement(folder: Path, group: Group) -> list[str]:
    """What ranks say that read different configurations, or do not see the same folder."""
    config, rank = config_in(folder), group.steps.rank
    other = config.model_copy(update={"learning": config.learning.model_copy(update={"lr": 0.5})})
    sentences = []
    for mine, place in ((other if rank else config, folder), (config, folder / f"private-{rank}")):
        try:
            agree(group.steps, mine, place)
        except UserError as error:
            sentences.append(str(error))
    agree(group.steps, config, folder)
    return [one.decode() for one in group.steps.gather(json.dumps(sentences).encode())]


async def four(folder: Path, group: Group) -> dict[str, Any]:
    """Goes on from what two ranks left, and from what one left."""
    learner = opened(folder, "run", group)
    begun = learner.step
    curve = await trained(learner, begun + 2)
    await learner.save_checkpoint()
    straight = await trained(opened(folder, "whole", group), STEPS)
    return {"begun": begun, "curve": curve, "straight": straight}


async def short(folder: Path, group: Group) -> dict[str, Any]:
    """Steps in which one rank runs out of memory, beside the same steps with enough of it; then what fits nowhere."""
    config, found = config_in(folder), {}
    learning = config.learning.model_copy(update={"micro_batch_tokens": 200})
    config = config.model_copy(update={"learning": learning})
    for case in ("plenty", "forward", "backward"):
        given = TorchLearner.open(config, folder / case, "r", resume=True, write_snapshot=write, group=group)
        models = [given._policy] + ([] if given._reference is None else [given._reference])
        for policy in models if group.steps.rank == 1 and case != "plenty" else ():
            short_of_memory(policy, 20, case)
        statistics = [await given.train_step(some_batch(step, groups=12, version=0)) for step in range(3)]
        names = ("loss", "grad_norm", "entropy", "kl", "trainable_tokens", "memory_splits", "micro_batch_tokens")
        found[case] = [[one[name] for name in names] for one in statistics]
        if case == "forward":
            await published(given, group)
            found["audit"] = len(await given.audit(some_batch(3, groups=5)))
            short_of_memory(given._policy, 3, case)
            try:
                await given.train_step(some_batch(3))
                own = ""
            except UserError as error:
                own = str(error)
            found["alone"] = [one.decode() for one in group.steps.gather(own.encode())]
    return found


async def dies(folder: Path, group: Group) -> dict[str, Any]:
    """Rank 1 vanishes in the middle of a step."""
    learner = opened(folder, "run", group)
    await trained(learner, 1)
    if group.steps.rank == 1:
        os._exit(9)
    try:
        await trained(learner, 3)
    except RuntimeError as error:
        return {"lost": lost_peer(error), "words": str(error)}
    return {}


def opened_adapters(folder: Path, run: str, group: Group | None) -> tuple[TorchLearner, AdapterSnapshots]:
    writer = AdapterSnapshots(folder / run / "base", "run-1", "float32", config_in(folder).lora.alpha)
    config = config_in(folder)
    learner = TorchLearner.open(
        config, folder / run, "run-1", resume=True, write_snapshot=writer, group=group, keep_base=writer.keep_base
    )
    return learner, writer


async def adapters(folder: Path, group: Group) -> dict[str, Any]:
    """Six steps, with a checkpoint in the middle from which the second half is done again; then an audit."""
    learner, _ = opened_adapters(folder, "run", group)
    curve = await trained(learner, 3)
    await learner.save_checkpoint()
    curve += await trained(learner, 6)
    straight = own_bits(learner)
    again, _ = opened_adapters(folder, "run", group)
    await trained(again, 6)
    resumed = own_bits(again)
    same = straight.keys() == resumed.keys() and all(torch.equal(straight[k], resumed[k]) for k in straight)
    told = group.steps.gather(json.dumps(same).encode())
    root = await published(again, group)
    audit = await audited(again, group)
    return {
        "curve": curve, "same": [json.loads(one) for one in told], "root": root, "audit": audit,
        "hash": again.initial_weights_hash, "kept": sorted(again._policy.stored()),
    }  # fmt: skip


JOBS = {job.__name__: job for job in (two, four, short, dies, adapters)}


def main() -> None:
    job, folder = JOBS[sys.argv[1]], Path(sys.argv[2])
    group = join_group("cpu", timeout_s=30.0)
    found = asyncio.run(job(folder, group))
    if group.steps.rank == 0:
        (folder / f"{job.__name__}.json").write_text(json.dumps(found))
    if job is not dies:
        leave_group()
    else:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()

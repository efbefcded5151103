"""AdamW and its state as named tensors.

Invariant: what ``optimizer_tensors`` gives, ``load_optimizer`` restores bit for bit, together with the random state.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echo2.config.sections import LearningSection
from echo2.errors import IntegrityError

MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def build_optimizer(parameters: Mapping[str, nn.Parameter], learning: LearningSection) -> torch.optim.AdamW:
    """Weight decay is for matrices; biases and norms are not pulled to 0."""
    matrices = [p for p in parameters.values() if p.ndim >= 2]
    others = [p for p in parameters.values() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": learning.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning.lr, betas=learning.betas, fused=True
    )


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], *, several_ranks: bool = False
) -> dict[str, Tensor]:
    """The optimizer's own tensors as ``NAME/moment``, none before the first update, and ``rng/DEVICE``.

    several_ranks: only what all ranks have alike, the CPU's random state.
    """
    tensors = {
        f"{name}/{moment}": optimizer.state[parameter][moment]
        for name, parameter in parameters.items()
        if optimizer.state.get(parameter)
        for moment in MOMENTS
    }
    tensors["rng/cpu"] = torch.get_rng_state()
    if torch.cuda.is_available() and not several_ranks:
        tensors |= {f"rng/cuda:{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    return tensors


def blank_moments(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
    """State to be read into, as after a first update."""
    for parameter in parameters.values():
        optimizer.state[parameter] = {
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        }


def load_optimizer(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], saved: Mapping[str, Tensor]
) -> None:
    """Raises IntegrityError when the tensors are of other parameters."""
    names = {name.rpartition("/")[0] for name in saved} - {"rng"}
    if strangers := sorted(names - set(parameters)):
        raise IntegrityError(f"optimizer state must be of this model's parameters, got {strangers[0]!r}")
    for name in names:
        parameter = parameters[name]
        state = {moment: saved[f"{name}/{moment}"] for moment in MOMENTS}
        for moment in ("exp_avg", "exp_avg_sq"):
            if state[moment].shape != parameter.shape:
                raise IntegrityError(f"{name}/{moment} must be {list(parameter.shape)}, is {list(state[moment].shape)}")
        # Clones: what safetensors gives is mapped from the file, which is removed one day.
        optimizer.state[parameter] = {moment: tensor.clone().to(parameter.device) for moment, tensor in state.items()}
    torch.set_rng_state(saved["rng/cpu"])
    for index in range(torch.cuda.device_count()):
        if f"rng/cuda:{index}" in saved:
            torch.cuda.set_rng_state(saved[f"rng/cuda:{index}"], index)

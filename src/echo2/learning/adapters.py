"""A policy that trains low-rank adapters beside frozen weights (LoRA, arXiv 2106.09685), made with PEFT.

Invariant: the base is version 0, bit for bit, as long as the learner lives; only adapters are trained, saved and
published, under the names that PEFT stores them by. With the adapters set aside the policy is version 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from echo2.config.lora import LoraSection
from echo2.errors import UserError
from echo2.learning.packing import MicroBatch
from echo2.learning.policy_model import PolicyModel
from echo2.learning.shortage import Watch

ALL_LINEAR = "all-linear"
_ADAPTER = "default"
_INSIDE = ".base_layer"
"""What PEFT inserts into the names of a layer's own tensors."""


class AdaptedModel(PolicyModel):
    """π of frozen weights and adapters."""

    def __init__(self, model: Any, **settings: Any) -> None:
        """model: a causal LM that ``adapt`` changed.  settings: those of ``PolicyModel``."""
        super().__init__(model, **settings)
        self.aliases = {}
        self.passes_of_update = 2  # through frozen matrices goes a gradient, and to them none

    def parameters(self) -> dict[str, nn.Parameter]:
        return {_peft_name(name): value for name, value in super().parameters().items()}

    def stored(self) -> dict[str, Tensor]:
        """The adapters. They come from the state, whose tensors need no gradient, in the parameters' order."""
        state = self.model.state_dict()
        return {_peft_name(name): state[name] for name, value in self.model.named_parameters() if value.requires_grad}

    def weights(self) -> dict[str, nn.Parameter]:
        named = self.model.named_parameters()
        return {name.replace(_INSIDE, ""): value for name, value in named if not value.requires_grad}

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block the weights compute without adapters."""
        # PEFT's own switch also turns gradients off and on, which parts that ranks hold must not notice.
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    @cached_property
    def _layers(self) -> list[Any]:
        from peft.tuners.tuners_utils import BaseTunerLayer

        return [module for module in self.model.modules() if isinstance(module, BaseTunerLayer)]


class BaseOf:
    """Version 0 of a policy with adapters: the reference of the KL term, without weights of its own."""

    def __init__(self, policy: AdaptedModel) -> None:
        self._policy = policy

    @property
    def watch(self) -> Watch:
        return self._policy.watch

    def break_off(self) -> None:
        self._policy.break_off()

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        with self._policy.alone():
            return self._policy.logprobs(micro)


def adapt(model: Any, section: LoraSection, seed: int) -> None:
    """Freeze a causal LM's weights and put adapters beside them; what it computes stays the same.

    The same seed gives the same adapters; the global random state is left as it was. Raises UserError without PEFT and
    for targets that are no linear layers of the model.
    """
    config_class, inject = _peft()
    targets: Sequence[str] = section.targets
    config = config_class(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=ALL_LINEAR if ALL_LINEAR in targets else list(targets),
        task_type="CAUSAL_LM",
    )
    wanted = set() if ALL_LINEAR in targets else set(targets)
    _check(model, wanted)
    model.requires_grad_(False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject(config, model)


def _check(model: Any, wanted: set[str]) -> None:
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    head = {name for name, module in model.named_modules() if module is model.get_output_embeddings()}
    known = sorted({name.rpartition(".")[2] for name in linear - head})
    for target in sorted(wanted):
        named = {name for name, _ in model.named_modules() if name == target or name.endswith(f".{target}")}
        if not named or not named <= linear - head:
            raise UserError(
                f"lora.targets must name linear layers of the model other than its output embedding, got {target!r}:"
                f" it has {', '.join(known)}"
            )


def _peft() -> tuple[Any, Any]:
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ModuleNotFoundError as error:
        raise UserError(
            f"lora.rank above 0 must have peft, and {error.name} is not installed; run: pip install 'echo2[lora]'"
        ) from error
    return LoraConfig, inject_adapter_in_model


def _peft_name(name: str) -> str:
    return f"base_model.model.{name.replace(f'.{_ADAPTER}.', '.')}"

"""Throughput where nobody has measured it: a roofline of one machine that generates with continuous batching.

Invariant: pure, and never more than the hardware's peaks allow; what comes out is an estimate and is marked as one
wherever it goes (``Offer.estimated``). A measurement replaces it.

The model (Williams, Waterman and Patterson, CACM 52(4), 2009: time is the larger of operations over peak rate and
bytes over bandwidth; operations and bytes of a transformer as in Pope et al., arXiv 2211.05102), for a dense model with
N parameters of b bytes, prompts of P tokens, replies of L tokens on average, k bytes of keys and values a token:

    prefill of a prompt       2·N·P operations                                  bound by operations
    one decoding step of B    max(2·N·B operations, N·b + B·k·(P + L/2) bytes)  bound by bytes until B is large
    sequences at once         B = (memory · 0.9 − N·b) / (k·(P + L)), at most ``max_sequences``
    rollouts per second       B / (B·prefill/shared + L·step)

The prompts of a group are prefilled once (``group_size`` shares it). Both peaks are multiplied by ``efficiency``, which
stands for all that is left out: attention's operations (they grow with P², and stay below a tenth up to about 4,000
tokens at 8 billion parameters), kernels short of their peaks, stragglers at the end of a batch, scoring, the network.
A model that does not fit one GPU is spread over as few as hold it; a machine runs as many copies as it has room for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from echo2.errors import UserError
from echo2.provisioning.gpus import Gpu, gpu_named
from echo2.provisioning.offers import Offer
from echo2.provisioning.prices.quotes import Quote

USABLE_MEMORY = 0.9
"""Share of a GPU's memory for weights, keys and values; the rest goes to activations and the allocator."""
DEFAULT_EFFICIENCY = 0.5
ASSUMED_MACHINES = 16
"""Of each kind that a price list has."""
_GIGA, _TERA = 1e9, 1e12


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine is to generate.

    Raises UserError for values that are none.
    """

    parameters: float
    """N."""
    kv_bytes_per_token: float
    """k; see the function of that name."""
    prompt_tokens: float
    """P, on average."""
    reply_tokens: float
    """L, on average and not at most."""
    group_size: int = 1
    """Replies that share a prompt's prefill."""
    bytes_per_parameter: float = 2.0
    """b: 2 for bf16. Fewer bytes save bandwidth only; products are counted as bf16."""
    max_sequences: int = 256
    """The engine's own limit on sequences at once."""
    efficiency: float = DEFAULT_EFFICIENCY
    """Share of the peaks that is reached end to end."""

    def __post_init__(self) -> None:
        for field in ("parameters", "kv_bytes_per_token", "reply_tokens", "bytes_per_parameter"):
            if not 0 < getattr(self, field) < math.inf:
                raise UserError(f"{field} must be more than 0, got {getattr(self, field):g}")
        if not 0 <= self.prompt_tokens < math.inf:
            raise UserError(f"prompt_tokens must be at least 0, got {self.prompt_tokens:g}")
        if not 0 < self.efficiency <= 1:
            raise UserError(f"efficiency must be a share above 0 and at most 1, got {self.efficiency:g}")
        for field in ("group_size", "max_sequences"):
            if getattr(self, field) < 1:
                raise UserError(f"{field} must be at least 1, got {getattr(self, field)}")

    @property
    def weight_bytes(self) -> float:
        return self.parameters * self.bytes_per_parameter


class Estimate(msgspec.Struct, frozen=True):
    """What one machine would deliver, and why."""

    rollouts_per_s: float
    sequences: int
    """At once, in each copy of the model."""
    copies: int
    """Of the model in the machine."""
    prefill_s: float
    """Of one prompt."""
    step_s: float
    """Of one token for all sequences of a copy."""
    bound_by: str
    """What limits a decoding step: "bytes" or "operations"."""

    @property
    def tokens_per_s(self) -> float:
        """Of all copies while they decode."""
        return self.copies * self.sequences / self.step_s


def kv_bytes_per_token(*, layers: int, kv_heads: int, head_dim: int, bytes_per_value: float = 2.0) -> float:
    """k = 2 · layers · kv_heads · head_dim · bytes; Qwen3-8B (36, 8, 128, bf16) has 147,456."""
    return 2 * layers * kv_heads * head_dim * bytes_per_value


def estimate(workload: Workload, gpu: Gpu, gpus: int = 1) -> Estimate:
    """Throughput of a machine with ``gpus`` GPUs, by the model above.

    Raises UserError when the model and one sequence do not fit the machine.
    """
    spread = _gpus_per_copy(workload, gpu, gpus)
    copies = gpus // spread
    sequences = min(workload.max_sequences, _room(workload, gpu, spread))
    operations_per_s = spread * gpu.bf16_tflops * _TERA * workload.efficiency
    bytes_per_s = spread * gpu.bandwidth_gb_per_s * _GIGA * workload.efficiency
    context = workload.prompt_tokens + workload.reply_tokens / 2
    computing_s = 2 * workload.parameters * sequences / operations_per_s
    reading_s = (workload.weight_bytes + sequences * workload.kv_bytes_per_token * context) / bytes_per_s
    step_s = max(computing_s, reading_s)
    prefill_s = 2 * workload.parameters * workload.prompt_tokens / operations_per_s
    batch_s = sequences * prefill_s / workload.group_size + workload.reply_tokens * step_s
    return Estimate(
        rollouts_per_s=copies * sequences / batch_s,
        sequences=sequences,
        copies=copies,
        prefill_s=prefill_s,
        step_s=step_s,
        bound_by="bytes" if reading_s >= computing_s else "operations",
    )


def rollouts_per_s(workload: Workload, gpu: str, gpus: int = 1) -> float:
    """The same for a GPU by name. Raises UserError for one we do not know."""
    return estimate(workload, gpu_named(gpu), gpus).rollouts_per_s


def estimated_offers(
    quotes: Iterable[Quote],
    workload: Workload | None,
    *,
    count: int = ASSUMED_MACHINES,
    measured: Mapping[str, float] = {},
) -> tuple[tuple[Offer, ...], tuple[str, ...]]:
    """Offers of ``count`` machines for every quote, and a sentence for each quote that has to be left out.

    How many machines a market holds is in no price list: ``count`` is an assumption. ``measured`` has the trajectories
    per second of one GPU by our name for it, and replaces the estimate: a machine of several GPUs is taken to be as
    many workers. Without a workload nothing is estimated.
    """
    offers: list[Offer] = []
    left_out: list[str] = []
    for quote in quotes:
        known = measured.get(quote.gpu)
        try:
            rate = quote.gpus * known if known is not None else _estimated(workload, quote)
        except UserError as error:
            left_out.append(f"{quote.name}: {error}")
            continue
        offers.append(
            Offer(
                name=quote.name,
                gpu=quote.gpu,
                count=count,
                usd_per_h=quote.usd_per_h,
                rollouts_per_s=rate,
                estimated=known is None,
            )
        )
    return tuple(offers), tuple(left_out)


def _estimated(workload: Workload | None, quote: Quote) -> float:
    if workload is None:
        raise UserError(f"the throughput of {quote.gpu} must be measured or estimated, and neither was asked for")
    return rollouts_per_s(workload, quote.gpu, quote.gpus)


def _room(workload: Workload, gpu: Gpu, spread: int) -> int:
    """Sequences whose keys and values fit beside the weights on ``spread`` GPUs."""
    free = spread * gpu.memory_gb * _GIGA * USABLE_MEMORY - workload.weight_bytes
    return math.floor(free / (workload.kv_bytes_per_token * (workload.prompt_tokens + workload.reply_tokens)))


def _gpus_per_copy(workload: Workload, gpu: Gpu, gpus: int) -> int:
    if gpus < 1:
        raise UserError(f"a machine must have at least 1 GPU, got {gpus}")
    for spread in range(1, gpus + 1):
        if _room(workload, gpu, spread) >= 1:
            return spread
    sequence = workload.kv_bytes_per_token * (workload.prompt_tokens + workload.reply_tokens)
    needed_gb = (workload.weight_bytes + sequence) / _GIGA
    usable_gb = gpus * gpu.memory_gb * USABLE_MEMORY
    raise UserError(
        f"the model and one sequence must fit the machine, got {needed_gb:.1f} GB for {usable_gb:.1f} GB usable on "
        f"{gpus} {gpu.name}: take {math.ceil(needed_gb / (gpu.memory_gb * USABLE_MEMORY))} or more, or a larger GPU"
    )

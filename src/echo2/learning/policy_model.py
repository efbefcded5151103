"""A Hugging Face causal LM as the function the learner needs: log-probs of sampled tokens.

Invariant: weights are float32, or float64 for exact comparisons; dropout is off, so two passes over the same tokens
agree exactly. Before the first step the model is checked against its own full logits, and prefixes are shared only
where that changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from math import inf
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as computed_again

from echo2.errors import ConfigError, UserError
from echo2.learning.accounting import ModelFlops, model_flops, peak_flops
from echo2.learning.batch import TrainingRow
from echo2.learning.logprobs import sampled_logprobs
from echo2.learning.memory import kept_bytes_per_token
from echo2.learning.packing import MicroBatch, pack
from echo2.learning.shortage import Watch, release
from echo2.learning.weights import stored_tensors

LOG = logging.getLogger(__name__)

LOGITS_BYTES = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}
"""Of a chunk's float32 logits, where no size is configured: enough rows for the matrix product to run at full speed."""
MASK_ROWS = 16
AGREEMENT = 1e-3
"""Largest difference in a log-prob between two ways of computing it in float32 that still counts as rounding."""


class Scores(Protocol):
    """What a reference is asked for."""

    @property
    def watch(self) -> Watch: ...

    def break_off(self) -> None: ...

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]: ...


class PolicyModel:
    """π of one set of weights."""

    def __init__(
        self,
        model: Any,
        *,
        compute_dtype: str,
        logits_chunk_tokens: int,
        activation_checkpointing: bool = False,
        compiles: bool = False,
        computes_on: torch.device | None = None,
    ) -> None:
        """model: a causal LM on its device, in float32 or float64.  logits_chunk_tokens: 0 for what ``LOGITS_BYTES``
        holds.  activation_checkpointing: of each block only the input is kept for the backward pass.  computes_on:
        where its parts go when it is split; None: where it is.

        Raises UserError when its logits cannot be computed in chunks.
        """
        self.model: Any = model.eval()
        self.device = next(model.parameters()).device
        self._weights_dtype: torch.dtype = next(model.parameters()).dtype
        self._run: Callable[[MicroBatch], tuple[Tensor, Tensor]] = self.compute_here
        self._body: nn.Module = model.base_model
        self.head: nn.Module = model.get_output_embeddings()
        self.vocabulary = int(self.head.weight.shape[0])
        self.watch = Watch()
        """Of memory that runs out in its passes."""
        self._let_go: Callable[[], None] = _nothing_held
        place = (computes_on or self.device).type
        self._chunk = logits_chunk_tokens or max(1, LOGITS_BYTES[place] // (4 * self.vocabulary))
        self.compute_dtype = self._weights_dtype
        self._autocasts = False
        self.shares_prefixes = False
        self.flops: ModelFlops = model_flops(model)
        stored, self.aliases = stored_tensors(model)
        self._stored = tuple(stored)
        self.passes_of_update = 3
        """Forward passes that a forward and a backward one cost."""
        self._check()
        if self._weights_dtype is torch.float32:
            self.compute_dtype = _supported(compute_dtype, computes_on or self.device)
            self._autocasts = self.compute_dtype is not torch.float32
        if activation_checkpointing:
            self.kept_bytes_per_token = _kept_with_checkpointing(self)
        if compiles:
            from echo2.learning.compiled import compile_blocks  # which takes seconds to load

            compile_blocks(model, computes_on or self.device)
        if activation_checkpointing:
            _compute_blocks_again(model)

    def split(
        self,
        logprobs: Callable[[MicroBatch], tuple[Tensor, Tensor]],
        device: torch.device,
        let_go: Callable[[], None],
    ) -> None:
        """From now on several ranks hold the weights, on ``device``; ``logprobs`` makes them whole around each pass,
        and ``let_go`` ends a pass that has no backward pass."""
        self._run = logprobs
        self._let_go = let_go
        self._autocasts = False  # what holds the weights casts them
        self.device = device

    def logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """[T] float32 log-probs of the micro-batch's targets at their temperatures, and [T] entropies; float64 where
        the weights are. Ranks that split the weights must all call it, each with a micro-batch of its own.

        Only hidden states that predict a target meet the vocabulary.
        """
        return self._run(micro)

    def compute_here(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """``logprobs`` with weights that are whole."""
        return self.read_off(micro, self.hidden(micro))

    def hidden(self, micro: MicroBatch) -> Tensor:
        """[B, L, H] last hidden states."""
        with torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=self._autocasts):
            found: Tensor = self._body(
                input_ids=micro.tokens,
                attention_mask=None if micro.visible is None else _additive(micro.visible, self.compute_dtype),
                position_ids=micro.positions,
                use_cache=False,
            ).last_hidden_state
        return found

    def read_off(self, micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of the micro-batch's targets from last hidden states."""
        wanted = hidden[micro.sheet, micro.source]
        if self._autocasts and wanted.is_cuda:
            # Norms leave float32 under autocast, and a product with the vocabulary is far too dear in it.
            wanted = wanted.to(self.compute_dtype)
        bias = getattr(self.head, "bias", None)
        weight: Tensor = self.head.weight  # type: ignore[assignment]
        return sampled_logprobs(wanted, weight, bias, micro.target, micro.temperature, chunk=self._chunk)

    def break_off(self) -> None:
        """Drop what a pass left whose backward pass will not come, on every rank."""
        for parameter in self.parameters().values():
            parameter.grad = None
        self._let_go()
        release(self.device)

    @cached_property
    def kept_bytes_per_token(self) -> float:
        """What a forward pass keeps of each token for the backward pass; to be asked before the weights are split."""
        return kept_bytes_per_token(self)

    @property
    def pairs_per_token(self) -> float:
        """Attended pairs of tokens that take as many operations as a token's matrix products do in the same layer."""
        return self.flops.per_token / self.flops.per_pair if self.flops.per_pair else inf

    @cached_property
    def peak_flops(self) -> float:
        """Per second, of this device in the type that is computed in."""
        return peak_flops(self.device, self.compute_dtype)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by name, tied ones once."""
        return {name: value for name, value in self.model.named_parameters() if value.requires_grad}

    def weights(self) -> dict[str, nn.Parameter]:
        """What a snapshot holds, by its names, tied ones once."""
        return dict(self.model.named_parameters())

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Inside the block only ``weights`` compute."""
        yield

    def stored(self) -> dict[str, Tensor]:
        """The distinct tensors of the model's state by name, as they are; ``aliases`` are the tied names."""
        state = self.model.state_dict()
        return {name: state[name] for name in self._stored}

    @torch.no_grad()
    def _check(self) -> None:
        """Compare with the model's own logits on a handful of tokens, one by one, padded together and packed."""
        rows = _probe_rows(self.vocabulary)
        expected = torch.cat([self._from_full_logits(row) for row in rows])
        padded = self._probe(rows, share_prefixes=False)
        error = float((padded - expected).abs().max())
        if not error < AGREEMENT:
            raise UserError(
                "the model's logits must be its output embedding applied to its last hidden states; for"
                f" {type(self.model).__name__} the log-probs differ by {error:.2g}: choose another architecture"
            )
        if _plain_attention(self.model.config):
            packed = self._probe(rows, share_prefixes=True)
            self.shares_prefixes = float((packed - expected).abs().max()) < AGREEMENT
        if not self.shares_prefixes:
            LOG.info("%s: prompts of a group are not shared, each reply is computed alone", type(self.model).__name__)

    def _from_full_logits(self, row: TrainingRow) -> Tensor:
        tokens = torch.from_numpy(row.tokens)[None].to(self.device)
        logits = self.model(input_ids=tokens, use_cache=False).logits[0].to(self._weights_dtype) / row.temperature
        before_target = np.flatnonzero(row.loss) - 1
        chosen: Tensor = logits.log_softmax(-1)[before_target, row.tokens[row.loss]]
        return chosen

    def _probe(self, rows: list[TrainingRow], *, share_prefixes: bool) -> Tensor:
        """[T] in the order of the rows, longest first: that is how they are packed."""
        micros = pack(rows, budget=1024, share_prefixes=share_prefixes)
        return torch.cat([self.logprobs(micro.to(self.device))[0] for micro in micros])


def _nothing_held() -> None: ...


def own_rows(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that is split over ranks; any other tensor as it is."""
    own: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return own


def whole(value: Tensor) -> Tensor:
    """What all ranks make of a value that each has a part of."""
    gathered: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return gathered


def _additive(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, 1, L, L] the mask as the attention kernels add it, made once: of a boolean one every layer makes and keeps
    its own. Rows begin at multiples of ``MASK_ROWS`` elements, as GPU kernels ask: else every layer copies it too."""
    *rows, length = visible.shape
    padded = torch.zeros(*rows, -(-length // MASK_ROWS) * MASK_ROWS, dtype=dtype, device=visible.device)
    return padded[..., :length].masked_fill_(~visible, -inf)


def blocks_of(model: Any) -> list[nn.Module]:
    """The model's repeated layers: the list of modules that holds most of it. None where it has no such list."""
    lists: list[nn.ModuleList] = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        return []
    largest: nn.ModuleList = max(lists, key=_size)
    return list(largest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _compute_blocks_again(model: Any) -> None:
    for block in blocks_of(model):
        block.forward = partial(computed_again, block.forward, use_reentrant=False, preserve_rng_state=False)


def _kept_with_checkpointing(policy: PolicyModel) -> float:
    """Of every block its input, and of the one that is computed again all that it keeps."""
    blocks = max(1, len(blocks_of(policy.model)))
    width: int = policy.model.config.get_text_config().hidden_size
    return kept_bytes_per_token(policy) / blocks + float(blocks * width * policy.compute_dtype.itemsize)


def pick_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one. Raises ConfigError for a device this machine lacks."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"learning.device must be auto, cpu, cuda or cuda:N, got {name!r}") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"learning.device is {name!r}, but this machine has {torch.cuda.device_count()} CUDA devices")
    return device


def _supported(name: str, device: torch.device) -> torch.dtype:
    """A CPU without bfloat16 arithmetic emulates it many times slower than float32, which is then used instead."""
    if name == "float32":
        return torch.float32
    if device.type == "cpu":
        features = torch.cpu.get_capabilities()
        if not any(features.get(feature) for feature in ("avx512_bf16", "amx_bf16", "bf16")):
            LOG.warning("learning.compute_dtype is bfloat16, which this processor only emulates; computing in float32")
            return torch.float32
    return torch.bfloat16


def _plain_attention(config: Any) -> bool:
    """Whether a given [query, key] mask means what it says: full attention, by the kernels that add masks."""
    text = config.get_text_config()
    windowed = getattr(text, "sliding_window", None) is not None
    layers = set(getattr(text, "layer_types", None) or ["full_attention"])
    return config._attn_implementation == "sdpa" and not windowed and layers == {"full_attention"}


def _probe_rows(vocabulary: int) -> list[TrainingRow]:
    """Two replies of different length to one prompt, longest first, with a temperature of their own each."""
    tokens = [(i * 7 + 3) % vocabulary for i in range(12)]
    replies = [(tokens[5:9], 0.7), (tokens[9:12], 1.3)]
    rows = []
    for reply, temperature in replies:
        ids = np.asarray(tokens[:5] + reply, np.int64)
        loss = np.arange(len(ids)) >= 5
        rows.append(TrainingRow(0, ids, loss, None, 0.0, temperature, current=True, nucleus=False))
    return rows

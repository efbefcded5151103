"""SGLang's dialect.

Invariant (I8): a prompt goes in as token ids by ``/generate``, and the tokens of a reply are those that its log-probs
are of, the ending one included; every sampling field is sent, so that no default of a model applies.

Log-probs are over the whole vocabulary at the sampling temperature, whatever top-p cut away: SGLang takes them before
it samples, unless ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set, which a managed server has not. Weights are taken from a
folder by ``/update_weights_from_disk``, which also names them; every reply says that name. It is read when the reply is
made, so a switch inside a reply would not show: there is none, because the engine lets no request run through a switch.
``ignore_eos`` would turn our own stop tokens off as well; where the tokenizer's end token is not one of them, a reply
that ends there is gone on with.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from echo2.errors import EngineError
from echo2.rollout.engines.servers.checkpoint import Checkpoint
from echo2.rollout.engines.servers.dialect import LOOK_S, Facts, named, routes, served
from echo2.rollout.engines.servers.rows import Answer, Question
from echo2.transport.json_line import JsonLine, WrongAnswer, decoded

WHO = "sglang server"
GENERATE, UPDATE, ABORT = "/generate", "/update_weights_from_disk", "/abort_request"
INFO, SERVER = "/get_model_info", "/get_server_info"
ADAPT, FORGET = "/load_lora_adapter", "/unload_lora_adapter"


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] | None = None
    completion_tokens: int | None = None
    prompt_tokens: int | None = None
    weight_version: str | None = None


class _Generated(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None


class _Info(msgspec.Struct):
    weight_version: str | None = None


class _Server(msgspec.Struct):
    enable_deterministic_inference: bool | None = None


class _Done(msgspec.Struct):
    success: bool
    message: str = ""


class Sglang:
    name = "sglang"
    health_path = "/health_generate"
    logprobs = True
    top_p_logprobs = True

    def __init__(self) -> None:
        self._routes: frozenset[str] = frozenset()
        self._takes_seeds = False
        self._adapter: str | None = None

    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "sglang.launch_server")

    def arguments(self, model: Path, name: str, port: int, dtype: str) -> Sequence[str]:
        return (
            "--model-path", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", dtype,
        )  # fmt: skip

    def environment(self, key: str) -> Mapping[str, str]:
        # It takes keys on its command line alone, where everybody can read them: it listens on loopback without.
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0", "HF_HUB_OFFLINE": "1"}

    async def look(self, line: JsonLine, name: str) -> Facts:
        self._routes = await routes(line, WHO)
        if not self._offers(GENERATE):
            raise EngineError(f"an SGLang server must offer {GENERATE}, this one does not")
        model, context = named(await served(line, WHO), name, WHO)
        notes = []
        if f"GET {SERVER}" in self._routes:
            body = await line.ask("GET", SERVER, deadline_s=LOOK_S)
            self._takes_seeds = bool(decoded(WHO, body, _Server, "its settings").enable_deterministic_inference)
        if not self._takes_seeds:
            notes.append("seeds have no effect without --enable-deterministic-inference")
        if not self._offers(UPDATE):
            notes.append("it takes no weights while it runs")
        return Facts(
            model=model,
            context=context,
            takes_weights=self._offers(UPDATE),
            takes_adapters=self._offers(ADAPT),
            halts=self._offers(ABORT),
            label_route=f"GET {INFO}" in self._routes and await self._label(line) is not None,
            notes=tuple(notes),
        )

    # ---- replies -----------------------------------------------------------------------------------------------

    async def ask(self, line: JsonLine, question: Question, deadline_s: float) -> Answer:
        sent: dict[str, Any] = {
            "input_ids": question.token_ids,
            "sampling_params": self._sampling(question),
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        }
        if self._adapter is not None:
            sent["lora_path"] = self._adapter
        body = await line.ask("POST", GENERATE, sent, deadline_s=deadline_s)
        answer = decoded(WHO, body, _Generated, "a token reply")
        meta = answer.meta_info
        entries = meta.output_token_logprobs or []
        tokens = tuple(token for _, token, _ in entries)
        _check_counts(answer, tokens, len(question.token_ids))
        return Answer(
            token_ids=tokens,
            logprobs=tuple(value for value, _, _ in entries),
            finish="" if meta.finish_reason is None else meta.finish_reason.type,
            labels=None if meta.weight_version is None else (meta.weight_version,),
        )

    def _sampling(self, question: Question) -> dict[str, Any]:
        sampling = question.sampling
        fields: dict[str, Any] = {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "max_new_tokens": sampling.max_new_tokens,
            "min_new_tokens": 0,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": False,
            "skip_special_tokens": False,
            "no_stop_trim": True,
        }
        if self._takes_seeds:
            fields["sampling_seed"] = sampling.seed
        return fields

    def _offers(self, path: str) -> bool:
        return f"POST {path}" in self._routes

    # ---- weights -----------------------------------------------------------------------------------------------

    async def label(self, line: JsonLine) -> str:
        label = await self._label(line)
        if label is None:
            raise WrongAnswer(f"{WHO}: {INFO} must tell weight_version, it does not any more")
        return label

    async def _label(self, line: JsonLine) -> str | None:
        return decoded(WHO, await line.ask("GET", INFO, deadline_s=LOOK_S), _Info, "its model").weight_version

    async def update(self, line: JsonLine, checkpoint: Checkpoint, label: str, deadline_s: float) -> None:
        sent = {
            "model_path": str(checkpoint.folder),
            "weight_version": label,
            "flush_cache": True,
            "abort_all_requests": True,  # those that we gave up and it did not notice yet
        }
        body = await line.ask("POST", UPDATE, sent, deadline_s=deadline_s)
        done = decoded(WHO, body, _Done, "whether it took the weights")
        if not done.success:
            raise WrongAnswer(f"{WHO}: it did not take the weights: {done.message}")
        self._adapter = None

    async def adapt(self, line: JsonLine, checkpoint: Checkpoint, name: str, deadline_s: float) -> None:
        sent = {"lora_name": name, "lora_path": str(checkpoint.folder)}
        body = await line.ask("POST", ADAPT, sent, deadline_s=deadline_s)
        done = decoded(WHO, body, _Done, "whether it took the adapter")
        if not done.success:
            raise WrongAnswer(f"{WHO}: it did not take the adapter: {done.message}")
        self._adapter = name

    async def forget(self, line: JsonLine, name: str) -> None:
        await line.ask("POST", FORGET, {"lora_name": name}, deadline_s=LOOK_S)

    def close(self) -> None:
        """Nothing is held."""

    async def halt(self, line: JsonLine) -> None:
        await line.ask("POST", ABORT, {"rid": "", "abort_all": True}, deadline_s=LOOK_S)


def _check_counts(answer: _Generated, tokens: tuple[int, ...], fed: int) -> None:
    """Whether what it says of the reply in several places is the same."""
    meta = answer.meta_info
    if meta.completion_tokens is not None and meta.completion_tokens != len(tokens):
        raise WrongAnswer(
            f"{WHO}: it must return one log-prob for each of {meta.completion_tokens} tokens, it returned {len(tokens)}"
        )
    if meta.prompt_tokens is not None and meta.prompt_tokens != fed:
        raise WrongAnswer(f"{WHO}: it must be fed the {fed} tokens of the prompt, it was fed {meta.prompt_tokens}")
    if answer.output_ids is not None and not _is_end_of(answer.output_ids, tokens):
        raise WrongAnswer(f"{WHO}: log-probs must be of the tokens of the reply, they are of others")


def _is_end_of(output_ids: Sequence[int], tokens: tuple[int, ...]) -> bool:
    """Some releases leave the token out that ended the reply."""
    return tuple(output_ids) in (tokens, tokens[:-1])

"""vLLM's dialect.

Invariant (I8): a prompt goes in as token ids and a reply comes back as token ids, by ``/inference/v1/generate`` where
the server offers it, else by ``/v1/completions``; every sampling field is sent, so that no default of a model applies.

Log-probs are vLLM's *processed* ones, at the sampling temperature. With top-p below 1 those are of the nucleus alone,
which is not the convention of a record, so such replies have none. Weights are taken while the server runs through
``/collective_rpc`` (``reload_weights`` from a folder) and named through ``/update_weight_version``: development routes,
which a managed server has switched on, on loopback. Replies of ``generate`` name the weights of each token.
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

WHO = "vllm server"
GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
RPC, NAME_WEIGHTS, WEIGHTS, ABORT = "/collective_rpc", "/update_weight_version", "/weight_info", "/abort_requests"
PAUSE, RESUME, SERVER = "/pause", "/resume", "/server_info"
ADAPT, FORGET = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
LOGPROBS = "processed_logprobs"
DESCRIBE_S = 300.0
"""For its description of itself: it runs programs to describe the machine, too, which takes long on a busy one."""


class _LogProb(msgspec.Struct):
    token_id: int
    logprob: float | None


class _LogProbs(msgspec.Struct):
    content: list[_LogProb] | None = None


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: _LogProbs | None = None
    weight_versions: list[_Span] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    model: str | None = None


class _TextLogProbs(msgspec.Struct):
    token_logprobs: list[float | None] | None = None


class _TextChoice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _TextLogProbs | None = None


class _Completed(msgspec.Struct):
    choices: list[_TextChoice]
    model: str | None = None


class _Weights(msgspec.Struct):
    weight_version: str


class _ModelConfig(msgspec.Struct):
    logprobs_mode: str | None = None


class _VllmConfig(msgspec.Struct):
    model_config: _ModelConfig


class _Server(msgspec.Struct):
    vllm_config: _VllmConfig


class Vllm:
    name = "vllm"
    health_path = "/health"
    logprobs = True
    top_p_logprobs = False

    def __init__(self) -> None:
        self._routes: frozenset[str] = frozenset()

    def command(self) -> tuple[str, ...]:
        return (sys.executable, "-m", "vllm.entrypoints.openai.api_server")

    def arguments(self, model: Path, name: str, port: int, dtype: str) -> Sequence[str]:
        return (
            "--model", str(model), "--served-model-name", name, "--host", "127.0.0.1", "--port", str(port),
            "--dtype", dtype, "--generation-config", "vllm", "--logprobs-mode", LOGPROBS, "--enable-scale-out",
        )  # fmt: skip

    def environment(self, key: str) -> Mapping[str, str]:
        return {
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_API_KEY": key,
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",  # the model is on the disk
        }

    async def look(self, line: JsonLine, name: str) -> Facts:
        self._routes = await routes(line, WHO)
        if not self._offers(GENERATE) and not self._offers(COMPLETIONS):
            raise EngineError(
                f"a vLLM server must offer {GENERATE} or {COMPLETIONS}, this one offers neither: its model must be one "
                "that generates, and config.json must say so under architectures"
            )
        model, context = named(await served(line, WHO), name, WHO)
        await self._check_logprobs(line)
        takes = all(map(self._offers, (RPC, NAME_WEIGHTS))) and f"GET {WEIGHTS}" in self._routes
        notes = [f"replies by {GENERATE if self._offers(GENERATE) else COMPLETIONS}"]
        if not takes:
            notes.append("it takes no weights while it runs; VLLM_SERVER_DEV_MODE=1 offers the routes for that")
        return Facts(
            model=model,
            context=context,
            takes_weights=takes,
            takes_adapters=self._offers(ADAPT),
            halts=self._offers(ABORT),
            label_route=f"GET {WEIGHTS}" in self._routes,
            notes=tuple(notes),
        )

    async def _check_logprobs(self, line: JsonLine) -> None:
        """A server that says which log-probs it gives must give those of the sampling temperature."""
        if f"GET {SERVER}" not in self._routes:
            return
        body = await line.ask("GET", SERVER, query={"config_format": "json"}, deadline_s=DESCRIBE_S)
        mode = decoded(WHO, body, _Server, "its configuration").vllm_config.model_config.logprobs_mode
        if mode is not None and mode != LOGPROBS:
            raise EngineError(f"a vLLM server must run with --logprobs-mode {LOGPROBS}, this one has {mode}")

    # ---- replies -----------------------------------------------------------------------------------------------

    async def ask(self, line: JsonLine, question: Question, deadline_s: float) -> Answer:
        if self._offers(GENERATE):
            return await self._generate(line, question, deadline_s)
        return await self._complete(line, question, deadline_s)

    async def _generate(self, line: JsonLine, question: Question, deadline_s: float) -> Answer:
        sent = {
            "model": question.model,
            "token_ids": question.token_ids,
            "sampling_params": {**self._sampling(question), "detokenize": False},
            "cache_salt": f"echo2-{question.model}-{question.label}",
        }
        body = await line.ask("POST", GENERATE, sent, deadline_s=deadline_s)
        answer = decoded(WHO, body, _Generated, "a token reply")
        choice = _only(answer.choices)
        content = None if choice.logprobs is None else choice.logprobs.content
        tokens = tuple(choice.token_ids or ())
        if content is not None and tuple(entry.token_id for entry in content) != tokens:
            raise WrongAnswer(f"{WHO}: log-probs must be of the tokens of the reply, they are of others")
        spans = choice.weight_versions
        if spans is not None:
            _check_spans(spans, len(tokens))
        return Answer(
            token_ids=tokens,
            logprobs=None if content is None or self._is_nucleus(question) else tuple(e.logprob for e in content),
            finish=choice.finish_reason or "",
            model=answer.model,
            labels=None if spans is None else tuple(span.version for span in spans),
        )

    async def _complete(self, line: JsonLine, question: Question, deadline_s: float) -> Answer:
        sent = {
            "model": question.model,
            "prompt": question.token_ids,
            "return_token_ids": True,
            "add_special_tokens": False,
            "stream": False,
            "cache_salt": f"echo2-{question.model}-{question.label}",
            **self._sampling(question),
        }
        body = await line.ask("POST", COMPLETIONS, sent, deadline_s=deadline_s)
        answer = decoded(WHO, body, _Completed, "a completion")
        choice = _only(answer.choices)
        if choice.token_ids is None:
            raise WrongAnswer(f"{WHO}: a completion must have the token_ids that were asked for, it has none")
        values = None if choice.logprobs is None else choice.logprobs.token_logprobs
        return Answer(
            token_ids=tuple(choice.token_ids),
            logprobs=None if values is None or self._is_nucleus(question) else tuple(values),
            finish=choice.finish_reason or "",
            model=answer.model,
            prompt_ids=None if choice.prompt_token_ids is None else tuple(choice.prompt_token_ids),
        )

    def _sampling(self, question: Question) -> dict[str, Any]:
        sampling = question.sampling
        return {
            "n": 1,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": sampling.seed,
            "max_tokens": sampling.max_new_tokens,
            "min_tokens": 0,
            "stop_token_ids": sampling.stop_token_ids,
            "ignore_eos": True,  # what ends a reply is in stop_token_ids, all of it
            "logprobs": 0,  # of the sampled token alone
        }

    @staticmethod
    def _is_nucleus(question: Question) -> bool:
        return question.sampling.top_p < 1

    def _offers(self, path: str) -> bool:
        return f"POST {path}" in self._routes

    # ---- weights -----------------------------------------------------------------------------------------------

    async def label(self, line: JsonLine) -> str:
        body = await line.ask("GET", WEIGHTS, deadline_s=LOOK_S)
        return decoded(WHO, body, _Weights, "the name of its weights").weight_version

    async def update(self, line: JsonLine, checkpoint: Checkpoint, label: str, deadline_s: float) -> None:
        pauses = self._offers(PAUSE) and self._offers(RESUME)
        if pauses:  # ends requests that we gave up and it did not notice yet; drops its caches
            await line.ask("POST", PAUSE, query={"mode": "abort", "clear_cache": "true"}, deadline_s=deadline_s)
        try:
            order = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint.folder)}}
            await line.ask("POST", RPC, order, deadline_s=deadline_s)
            await line.ask("POST", NAME_WEIGHTS, {"new_version": label}, deadline_s=LOOK_S)
        finally:
            if pauses:
                await line.ask("POST", RESUME, deadline_s=LOOK_S)

    async def adapt(self, line: JsonLine, checkpoint: Checkpoint, name: str, deadline_s: float) -> None:
        sent = {"lora_name": name, "lora_path": str(checkpoint.folder)}
        await line.ask("POST", ADAPT, sent, deadline_s=deadline_s)

    async def forget(self, line: JsonLine, name: str) -> None:
        await line.ask("POST", FORGET, {"lora_name": name}, deadline_s=LOOK_S)

    def close(self) -> None:
        """Nothing is held."""

    async def halt(self, line: JsonLine) -> None:
        await line.ask("POST", ABORT, {}, deadline_s=LOOK_S)


def _only(choices: Sequence[Any]) -> Any:
    if len(choices) != 1:
        raise WrongAnswer(f"{WHO}: one reply was asked for, {len(choices)} came")
    return choices[0]


def _check_spans(spans: Sequence[_Span], count: int) -> None:
    """Whether they cover the reply's tokens, each once."""
    at = 0
    for span in spans:
        if span.start != at or span.end < span.start:
            raise WrongAnswer(f"{WHO}: weight versions must cover the reply's {count} tokens, they leave some out")
        at = span.end
    if at != count:
        raise WrongAnswer(f"{WHO}: weight versions must cover the reply's {count} tokens, they cover {at}")

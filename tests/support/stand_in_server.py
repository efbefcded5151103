"""A vLLM-like server as a program, without a model: for tests of how a worker starts, watches and ends one.

    python stand_in_server.py [--child FILE] [--dies-at N FILE] [--fails WORDS] … vLLM's own arguments

Replies follow from prompt, seed and the weights file. ``--child`` starts a process of its own in a session of its own,
whose pid goes to FILE. With ``--dies-at`` the N-th reply ends the program, once: FILE remembers it. With
``--always-dies`` every reply does, unless FILE is there.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from aiohttp import web


def main() -> None:
    parser = ArgumentParser()
    for name in (
        "--model",
        "--served-model-name",
        "--host",
        "--port",
        "--dtype",
        "--child",
        "--fails",
        "--always-dies",
    ):
        parser.add_argument(name)
    parser.add_argument("--dies-at", nargs=2)
    parser.add_argument("--hangs", action="store_true")
    known, _ = parser.parse_known_args()
    if known.fails:
        print("starting\nValueError: " + known.fails, file=sys.stderr)
        sys.exit(3)
    if known.hangs:
        time.sleep(1000)
    if known.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        Path(known.child).write_text(str(child.pid))
    weights = (Path(known.model) / "model.safetensors").read_bytes()
    count = 0

    async def complete(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        if known.dies_at and count == int(known.dies_at[0]) and not Path(known.dies_at[1]).exists():
            Path(known.dies_at[1]).touch()
            os._exit(9)
        if known.always_dies and not Path(known.always_dies).exists():
            os._exit(9)
        body = await request.json()
        if request.headers.get("Authorization") != f"Bearer {os.environ['VLLM_API_KEY']}":
            return web.json_response({"error": "key"}, status=401)
        if body["model"] != known.served_model_name:
            return web.json_response({"error": "model"}, status=404)
        digest = hashlib.blake2b(weights + repr((body["prompt"], body["seed"])).encode()).digest()
        tokens = [byte % 64 for byte in (digest * 4)[: body["max_tokens"]]]
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length", "token_ids": tokens}
        choice["logprobs"] = {"token_logprobs": [-1.0] * len(tokens)}
        return web.json_response({"model": body["model"], "choices": [choice]})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": known.served_model_name, "max_model_len": 64}]})

    async def openapi(request: web.Request) -> web.Response:
        return web.json_response({"paths": {"/v1/completions": {"post": {}}}})

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/openapi.json", openapi)
    app.router.add_get("/health", health)
    web.run_app(app, host=known.host, port=int(known.port), print=None)


if __name__ == "__main__":
    main()

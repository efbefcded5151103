"""Parallax's own server as a program: conversations go in, text sampled from the model at --model-path comes out."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import torch
from aiohttp import web
from fake_servers import Backend, FakeParallax
from transformers import AutoTokenizer


class Speaking(FakeParallax):
    def __init__(self, folder: str) -> None:
        super().__init__(Backend(context=256), model=folder)
        self.backend.load(folder)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)

    async def chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        tokenizer = self._tokenizer
        prompt = tokenizer.apply_chat_template(asked["messages"], add_generation_prompt=True, return_dict=False)
        tokens, _, _, finish = await self.backend.sample(
            prompt, asked["max_tokens"], asked["temperature"], asked["top_p"], asked["seed"], [tokenizer.eos_token_id]
        )
        said = {"role": "assistant", "content": tokenizer.decode(tokens, skip_special_tokens=True)}
        choice = {"index": 0, "message": said, "finish_reason": finish}
        return await self.reply({"id": "1", "object": "chat.completion", "model": asked["model"], "choices": [choice]})


def main() -> None:
    parser = ArgumentParser()
    for name in ("--model-path", "--host", "--port"):
        parser.add_argument(name, required=True)
    known, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    web.run_app(Speaking(known.model_path).application(), host=known.host, port=int(known.port), print=None)


if __name__ == "__main__":
    main()

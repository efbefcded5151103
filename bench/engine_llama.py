"""llama.cpp's part of ``bench.engine``: run by an interpreter that has llama-cpp-python, with a JSON order.

As many sequences decode side by side as the order's lanes hold; a finished one gives its place to the next. The prompt
is read once and its cells are shared. Sampling is llama.cpp's own, from the whole distribution at temperature 1.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import llama_cpp


def main() -> None:
    order = json.loads(sys.argv[1])
    llama_cpp.llama_backend_init()
    llama_cpp.llama_log_set(_silent, None)
    model = llama_cpp.llama_model_load_from_file(order["model"].encode(), llama_cpp.llama_model_default_params())
    places = order["lanes"] * len(order["lengths"])
    context = llama_cpp.llama_init_from_model(model, _parameters(order, places))
    memory = llama_cpp.llama_get_memory(context)
    sampler = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    llama_cpp.llama_sampler_chain_add(sampler, llama_cpp.llama_sampler_init_dist(0))
    prompt, waiting = order["prompt"], list(order["lengths"]) * order["groups"]
    batch = llama_cpp.llama_batch_init(max(len(prompt), places), 0, 1)
    began = time.perf_counter()
    _fill(batch, [(token, at, places, at == len(prompt) - 1) for at, token in enumerate(prompt)])
    _decode(context, batch)
    growing: dict[int, list[int]] = {}  # sequence -> [newest token, its position, tokens left]
    tokens = 0
    first = [llama_cpp.llama_sampler_sample(sampler, context, -1) for _ in waiting]
    while waiting or growing:
        for place in range(places):
            if place not in growing and waiting:
                llama_cpp.llama_memory_seq_cp(memory, places, place, -1, -1)
                growing[place] = [first.pop(), len(prompt), waiting.pop(0) - 1]
                tokens += 1
        rows = list(growing.items())
        _fill(batch, [(row[0], row[1], place, True) for place, row in rows])
        _decode(context, batch)
        for number, (place, row) in enumerate(rows):
            row[0] = llama_cpp.llama_sampler_sample(sampler, context, number)
            row[1] += 1
            row[2] -= 1
            tokens += 1
            if row[2] == 0:
                llama_cpp.llama_memory_seq_rm(memory, place, -1, -1)
                del growing[place]
    figures = {"seconds": time.perf_counter() - began, "groups": order["groups"], "tokens": tokens}
    print(json.dumps(figures | {"cpu_s": time.process_time()}))


def _parameters(order: dict[str, Any], places: int) -> Any:
    parameters = llama_cpp.llama_context_default_params()
    longest = len(order["prompt"]) + max(order["lengths"])
    parameters.n_ctx = (longest + 32) * (places + 1)
    parameters.n_seq_max = places + 1
    parameters.n_batch = parameters.n_ubatch = 512
    parameters.n_threads = parameters.n_threads_batch = order["threads"]
    parameters.kv_unified = order["unified"]
    parameters.type_k = parameters.type_v = 0  # float32, as the weights
    return parameters


def _fill(batch: Any, tokens: list[tuple[int, int, int, bool]]) -> None:
    """(token, position, sequence, whether its logits are wanted)"""
    batch.n_tokens = len(tokens)
    for at, (token, position, sequence, wanted) in enumerate(tokens):
        batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
        batch.seq_id[at][0], batch.logits[at] = sequence, wanted


def _decode(context: Any, batch: Any) -> None:
    code = llama_cpp.llama_decode(context, batch)
    if code:
        raise RuntimeError(f"llama_decode answered {code}")


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: Any) -> None:
    return


if __name__ == "__main__":
    main()

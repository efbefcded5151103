"""How many replies a second one core judges. Prints one JSON object.

    python -m bench.maths [--replies 2000] [--gsm8k FOLDER]

``plain`` replies give numbers, as GSM8K and AIME ask for, after a thousand characters of working; ``expressions`` need
algebra, and no two are written alike; of ``typical`` replies one in four does. Golds repeat as they do in a run, in
groups of sixteen; half the replies are right. Seconds are of processor time, the grader's processes included, best of
three turns after one that is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from echo2.config.sections import TaskSection
from echo2.data.maths.grader import grader
from echo2.data.registry import load_task
from echo2.data.task import Task
from echo2.types import Prompt

GROUP = 16
TURNS = 3
WORKING = "We compute step by step: 12 + 30 = 42, and then $x^2 = 49$, so that \\frac{1}{2} of it is 24.5. " * 10
PLAIN = ["18", "70000", "-5", "1,234", "0.5", "3/4", "073", "1024", "360", "12.25"]
EXPRESSIONS = [
    (r"\sqrt{2}", r"2^{1/2}", r"\sqrt{3}"),
    (r"2^{n-1}", r"\frac{2^n}{2}", r"2^{n}"),
    (r"\frac{n(n+1)}{2}", r"\frac{n^2+n}{2}", r"\frac{n^2-n}{2}"),
    (r"x \le 3", r"(-\infty, 3]", r"(-\infty, 3)"),
    (r"\frac{\pi}{4}", r"\pi/4", r"\frac{\pi}{3}"),
    (r"f(x)=x+c", r"f(x) = c + x", r"f(x)=cx"),
    (r"3+2\sqrt{2}", r"(1+\sqrt{2})^2", r"3-2\sqrt{2}"),
    (r"\binom{10}{3}", r"\frac{10!}{3!\,7!}", r"\binom{10}{4}"),
]
Pairs = list[tuple[Prompt, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replies", type=int, default=2000, help="replies of each kind")
    parser.add_argument("--gsm8k", type=Path, default=None, help="folder with test.jsonl, to judge its golds too")
    chosen = parser.parse_args()
    task = load_task(TaskSection(name="maths"))
    plain, expressions = plain_pairs(task, chosen.replies), expression_pairs(task, chosen.replies)
    kinds = {"plain": plain, "expressions": expressions, "typical": mixed(plain, expressions)}
    if chosen.gsm8k is not None:
        kinds["gsm8k"] = gsm8k_pairs(chosen.gsm8k)
    facts = {name: asyncio.run(measure(task, pairs)) for name, pairs in kinds.items()}
    print(json.dumps({"cores": os.cpu_count(), "replies_per_core_second": facts}, indent=1))
    grader().close()


def reply(answer: str) -> str:
    return rf"{WORKING}So the answer is \boxed{{{answer}}}."


def plain_pairs(task: Task, count: int) -> Pairs:
    prompts = [task.prompt_for_gold(gold) for gold in PLAIN]
    wrong = [reply("17"), reply("7/3")]
    return [
        (prompts[i // GROUP % len(PLAIN)], reply(PLAIN[i // GROUP % len(PLAIN)]) if i % 2 else wrong[i % 4 // 2])
        for i in range(count)
    ]


def expression_pairs(task: Task, count: int) -> Pairs:
    prompts = [task.prompt_for_gold(gold) for gold, _, _ in EXPRESSIONS]
    numbers = [i // GROUP % len(EXPRESSIONS) for i in range(count)]
    return [(prompts[number], reply(varied(EXPRESSIONS[number][1 + i % 2], i))) for i, number in enumerate(numbers)]


def varied(answer: str, number: int) -> str:
    """The same value in a text of its own, so that nothing is read from a cache; an interval stays as it is."""
    return answer if answer.startswith("(-") else f"{answer} + {number} - {number}"


def mixed(plain: Pairs, expressions: Pairs) -> Pairs:
    """Each fourth group from ``expressions``, in their order."""
    return [
        expressions[i // (4 * GROUP) * GROUP + i % GROUP] if i // GROUP % 4 == 3 else pair
        for i, pair in enumerate(plain)
    ]


def gsm8k_pairs(folder: Path) -> Pairs:
    task = load_task(TaskSection(name="maths", options={"path": str(folder / "test.jsonl"), "eval_every": 2}))
    prompts = [task.prompt("train", i) for i in range(task.size("train") or 0)]
    return [(prompt, reply(prompt.content["gold"])) for prompt in prompts]


async def measure(task: Task, pairs: Sequence[tuple[Prompt, str]]) -> float:
    rates = []
    for _ in range(1 + TURNS):
        started_s = processor_s()
        for start in range(0, len(pairs), GROUP):
            await asyncio.gather(*(task.judge(*pair) for pair in pairs[start : start + GROUP]))
        rates.append(len(pairs) / (processor_s() - started_s))
    return round(max(rates[1:]), 1)


def processor_s() -> float:
    """Of this process and of the grader's, as Linux counts it."""
    mine = time.process_time()
    return mine + sum(_used_s(pid) for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in listed.read_text().split()] if listed.exists() else []
    for thread in Path(f"/proc/{pid}/task").glob("*/children") if pid == os.getpid() else ():
        children += [int(child) for child in thread.read_text().split() if int(child) not in children]
    return children + [grandchild for child in children for grandchild in _descendants(child)]


def _used_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

"""Kind A of docs/field-reports.md: answers that broke graders elsewhere, through every path that grades here."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from echo2.config.sections import TaskSection
from echo2.data.maths.task import Maths
from echo2.data.registry import load_task
from echo2.errors import UserError

pytestmark = pytest.mark.timeout(300)

HOSTILE = (r"9^{9^{9^{9}}}", r"10^{10^{10}}", r"2^{1000000000}", r"\binom{1000000000}{500000000}")
INTEGER_TASKS = ("arithmetic", "integer_answers", "aime24")


def rewards(gold: str, reply: str, *, whole: bool = False) -> set[float]:
    """What every task and path pays; ``whole`` golds also through the tasks that ask for integers."""
    maths = load_task(TaskSection(name="maths"))
    prompt = maths.prompt_for_gold(gold)
    paid = {maths.score(prompt, reply).reward, asyncio.run(maths.judge(prompt, reply)).reward}
    for name in INTEGER_TASKS if whole else ():
        task = load_task(TaskSection(name=name))
        paid.add(task.score(task.prompt_for_gold(gold), reply).reward)
    return paid


@pytest.mark.parametrize(
    ("gold", "reply", "reward"),
    [
        ("16", r"\boxed{016}", 1.0),
        ("73", r"\boxed{073}", 1.0),
        ("073", r"\boxed{73}", 1.0),
        ("0", r"\boxed{000}", 1.0),
        ("33", r"\boxed{33.0}", 1.0),
        ("16", r"\boxed{160}", 0.0),
        ("16", r"\boxed{-16}", 0.0),
        ("16", r"\boxed{16.5}", 0.0),
    ],
)
def test_a01_leading_zeros_are_the_same_integer(gold: str, reply: str, reward: float) -> None:
    assert rewards(gold, reply, whole=True) == {reward}


def test_a02_an_answer_boxed_twice_is_one_answer() -> None:
    assert rewards("840", "so \\boxed{840}.\n\n## Final Answer\n\\boxed{840}", whole=True) == {1.0}
    assert rewards("4", r"\boxed{004} and \boxed{004}", whole=True) == {1.0}


def test_a03_the_last_box_counts() -> None:
    reply = r"First attempt gives \boxed{5}. Wrong; so \boxed{7}."
    assert rewards("7", reply, whole=True) == {1.0}
    assert rewards("5", reply, whole=True) == {0.0}


@pytest.mark.parametrize("reply", ["The sum of 12 and 13 is computed. I think 25 is plausible but", ""])
def test_a05_a_number_that_is_never_given_as_the_answer_pays_nothing(reply: str) -> None:
    assert rewards("25", reply, whole=True) == {0.0}


@pytest.mark.parametrize("gold", ["", "   ", r"\frac{", "all the numbers n such that n is odd"])
def test_a05_a_gold_that_cannot_be_compared_is_refused(gold: str, maths: Maths) -> None:
    with pytest.raises(UserError, match="a gold answer must be one that can be compared"):
        maths.prompt_for_gold(gold)


@pytest.mark.parametrize("length", [90, 110, 160, 400])
def test_a07_a_long_answer_is_read_whole(length: int) -> None:
    terms = [f"{n}x^{{{n}}}" for n in range(2, 100)]
    gold = ""
    for term in terms:
        if len(gold) + len(term) + 1 <= length:
            gold = f"{gold}+{term}" if gold else term
    assert length - 10 < len(gold) <= length
    padding = "Let us see. " * 100
    assert rewards(gold, rf"{padding}\boxed{{{gold}}}{padding}") == {1.0}
    assert rewards(gold, rf"{padding}\boxed{{{gold}+1}}") == {0.0}


def test_a08_endless_expressions_score_zero_and_delay_nobody(maths: Maths) -> None:
    """Limits are of processor time; the assertions on real time leave room for a busy machine."""
    prompt, other = maths.prompt_for_gold("5"), maths.prompt_for_gold(r"\sqrt{2}")
    maths.score(other, r"\boxed{2^{1/2}}")  # the grader has started

    async def batch() -> tuple[list[str], float, float]:
        started = time.monotonic()

        async def judged(which: str) -> tuple[str, float]:
            asked = other if "sqrt" in which else prompt
            score = await maths.judge(asked, rf"\boxed{{{which}}}")
            return score.status, time.monotonic() - started

        honest = ["5", r"\frac{\sqrt{8}}{2}", "05", r"\sqrt{2}"]
        found = await asyncio.gather(*(judged(which) for which in (*HOSTILE, *honest)))
        return [status for status, _ in found], max(s for _, s in found[:4]), max(s for _, s in found[4:])

    statuses, hostile_s, honest_s = asyncio.run(batch())
    assert statuses == ["too_costly"] * 4 + ["correct"] * 4
    assert hostile_s < 120 and honest_s < 120


def _in_a_process(queue: multiprocessing.Queue[list[float]]) -> None:
    task = load_task(TaskSection(name="maths"))
    pairs = ((r"\sqrt{3}", "3^{1/2}"), (r"\frac{1}{3}", r"\frac{1}{3}"), ("5", HOSTILE[3]))
    queue.put([task.score(task.prompt_for_gold(gold), rf"\boxed{{{answer}}}").reward for gold, answer in pairs])


def test_a10_threads_pools_tasks_and_processes_grade_alike(maths: Maths) -> None:
    third, root, five = (maths.prompt_for_gold(gold) for gold in (r"\frac{1}{3}", r"\sqrt{3}", "5"))
    pairs = [(root, r"\boxed{3^{1/2}}"), (third, r"\boxed{\frac{1}{3}}"), (five, rf"\boxed{{{HOSTILE[3]}}}")]
    with ThreadPoolExecutor(3) as pool:
        in_threads = [score.reward for score in pool.map(lambda pair: maths.score(*pair), pairs)]

    async def tasks() -> list[float]:
        return [score.reward for score in await asyncio.gather(*(maths.judge(*pair) for pair in pairs))]

    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    process = spawn.Process(target=_in_a_process, args=(queue,))
    process.start()
    in_process = queue.get(timeout=200)
    process.join(60)
    assert process.exitcode == 0
    assert in_threads == asyncio.run(tasks()) == in_process == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("gold", "reply"),
    [
        (r"\frac{1}{2^{99}}", r"\boxed{\frac{1}{2^{98}}}"),
        ("1331 and 1728", r"\boxed{1728}"),
        (r"\pm 2021", r"\boxed{2021}"),
        ("3", r"\boxed{3.0000001}"),
        (r"\sqrt{2}", r"\boxed{1.414214}"),
        (r"\{\frac{1}{2^{99}}, x\}", r"\boxed{\{\frac{1}{2^{98}}, x\}}"),
    ],
)
def test_a12_nearly_or_partly_right_is_wrong(gold: str, reply: str) -> None:
    assert rewards(gold, reply) == {0.0}
    assert rewards(gold, rf"\boxed{{{gold}}}") == {1.0}


@pytest.mark.parametrize(
    ("gold", "reply", "reward"),
    [
        ("-5", r"\boxed{-5}", 1.0),
        ("-5", "\\boxed{\u22125}", 1.0),
        ("-5", r"\boxed{5}", 0.0),
        ("5", r"\boxed{-5}", 0.0),
        ("12", r"\boxed{12\text{ cm}}", 1.0),
        ("104", r"\boxed{104^\circ}", 1.0),
        ("50", r"\boxed{50\%}", 1.0),
        ("73", "Final Answer: **73**", 1.0),
    ],
)
def test_a15_signs_count_units_and_bold_do_not(gold: str, reply: str, reward: float) -> None:
    assert rewards(gold, reply, whole=True) == {reward}


def test_a15_a_percentage_is_the_number_or_its_hundredth() -> None:
    assert rewards("0.5", r"\boxed{50\%}") == {1.0}
    assert rewards("5", r"\boxed{50\%}", whole=True) == {0.0}


def test_a16_the_gold_decides_how_the_answer_is_read() -> None:
    assert rewards("x<3", r"\boxed{(-\infty,3)}") == {1.0}
    assert rewards(r"(-\infty,3)", r"\boxed{x<3}") == {0.0}


def test_a16_mark_and_box_are_one_answer() -> None:
    assert rewards("5", r"Answer: \boxed{5}", whole=True) == {1.0}
    assert rewards("5", "Answer: 5", whole=True) == {1.0}

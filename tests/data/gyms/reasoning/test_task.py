from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from echo2.config.sections import TaskSection
from echo2.data.gyms.gym import GymError
from echo2.data.gyms.reasoning.library import Library
from echo2.data.gyms.reasoning.messages import Judge, Make
from echo2.data.gyms.reasoning.task import ReasoningGym, find_answer
from echo2.data.registry import environment_names, load_task
from echo2.data.task import Score, Split, Task
from echo2.errors import ConfigError, UserError
from echo2.types import Prompt

pytest.importorskip("reasoning_gym")
pytestmark = pytest.mark.timeout(300)

WITHOUT_GOLD = {
    "boxnet": "any plan that moves every box is right; the library keeps none",
    "rush_hour": "any moves that free the car are right; the library keeps none",
}
"""Environments whose problems come without a right answer."""
CONFIGS: dict[str, dict[str, Any]] = {
    "composite": {"datasets": [{"name": "chain_sum"}, {"name": "leg_counting", "weight": 2.0}]}
}
"""What has no configuration of its own by default."""
SMALL: dict[str, dict[str, Any]] = {
    "knight_swap": {"max_nodes": 7, "min_pieces": 1, "max_pieces": 1, "min_steps": 2, "max_steps": 6},
    "zebra_puzzles": {"num_people": 3, "num_characteristics": 3},
    "futoshiki": {"max_board_size": 4},
}
"""Of what takes long to make by default."""


def task_of(name: str, **options: object) -> Task:
    return load_task(TaskSection(name=name, options=options))


def over_the_wire(prompt: Prompt) -> Prompt:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(prompt), type=Prompt)


def faults_of(name: str, split: Split, count: int, configs: Mapping[str, dict[str, Any]]) -> list[str]:
    """What is wrong with the first prompts of an environment."""
    environment = name.partition("/")[2]
    config = configs.get(environment)
    task = task_of(name, **({} if config is None else {"config": config}))
    faults = []
    for index in range(count):
        try:
            prompt = task.prompt(split, index)
        except UserError as error:
            faults.append(str(error))
            continue
        if task.prompt(split, index) != prompt:
            faults.append(f"{prompt.prompt_id}: another prompt the second time")
        gold = task.gold_reply(prompt)
        if (gold is None) != (environment in WITHOUT_GOLD):
            faults.append(f"{prompt.prompt_id}: gold reply {gold!r}")
        sent = over_the_wire(prompt)
        if gold is not None and task.score(sent, f"<answer>7</answer>… no: {gold}") != Score(1.0, "correct"):
            faults.append(f"{prompt.prompt_id}: {gold!r} scores {task.score(sent, gold)}")
        if task.score(sent, "") != Score(0.0, "no_answer") or task.score(sent, "<answer></answer>").reward:
            faults.append(f"{prompt.prompt_id}: an empty reply scores")
    return faults


def test_every_environment_repeats_its_prompts_and_pays_its_gold_answers_in_full() -> None:
    names = environment_names("reasoning_gym")

    assert len(names) >= 100
    assert [fault for name in names for fault in faults_of(name, "train", 1, CONFIGS | SMALL)] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_environment_keeps_its_word_over_many_prompts(split: Split) -> None:
    names = environment_names("reasoning_gym")

    assert [fault for name in names for fault in faults_of(name, split, 3, CONFIGS)] == []


def test_held_out_questions_are_never_trained_on_even_where_there_are_few() -> None:
    task = task_of("reasoning_gym/coin_flip", config={"min_trials": 1, "max_trials": 2})
    seen = {
        split: {task.prompt(split, index).content["question"] for index in range(60)} for split in ("train", "eval")
    }

    assert len(seen["train"]) > 3
    assert seen["train"].isdisjoint(seen["eval"])
    assert seen["eval"]


def test_an_environment_with_too_few_questions_to_hold_some_out_says_so() -> None:
    task = task_of("reasoning_gym/count_bits", config={"min_n": 1, "max_n": 1})

    with pytest.raises(UserError, match="must have enough different questions to hold some out"):
        _ = [task.prompt(split, 0) for split in ("train", "eval")]


def test_other_seeds_give_other_problems_and_names_the_same_ones() -> None:
    questions = [
        task.prompt("train", 0).content["question"]
        for task in (
            task_of("reasoning_gym/chain_sum"),
            task_of("reasoning_gym", environment="chain_sum"),
            task_of("reasoning_gym/chain_sum", seed=1),
        )
    ]

    assert questions[0] == questions[1] != questions[2]


@pytest.mark.parametrize(
    ("reply", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<think><answer>4</answer></think>\n<answer>\n 5 \n</answer> done", "5"),
        ("<answer>4</answer> or <answer>5", "4"),
        ("<answer>4 <answer>5</answer>", "5"),
        ("5", None),
        ("<answer> </answer>", None),
        ("</answer>5<answer>", None),
        ("<answer>" * 100_000, None),
    ],
)
def test_the_answer_stands_in_the_last_closed_pair_of_tags(reply: str, answer: str | None) -> None:
    assert find_answer(reply) == answer


def test_a_right_answer_outside_the_tags_or_among_others_does_not_pay_in_full() -> None:
    task = task_of("reasoning_gym/leg_counting")
    prompt = task.prompt("train", 0)
    gold = str(prompt.content["answer"])

    assert task.score(prompt, f"It is {gold}.") == Score(0.0, "no_answer")
    assert task.score(prompt, f"<answer>{gold} or {gold}0</answer>").status == "partial"
    strict = task_of("reasoning_gym/leg_counting", threshold=1.0)
    assert strict.score(prompt, f"<answer>{gold} or {gold}0</answer>") == Score(0.0, "wrong")
    assert strict.score(prompt, f"<answer>{gold}</answer>") == Score(1.0, "correct")
    assert task.score(prompt, f"<answer>{'9' * 20_000}</answer>") == Score(0.0, "too_long")


@pytest.mark.parametrize("environment", ["string_insertion", "spiral_matrix", "binary_matrix", "n_queens", "puzzle24",
                                         "countdown", "simple_integration", "polynomial_multiplication"])  # fmt: skip
def test_no_reply_is_run(environment: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    marker = tmp_path_factory.mktemp("run") / "ran"
    task = task_of(f"reasoning_gym/{environment}")
    prompt = task.prompt("train", 0)
    for code in (f"__import__('os').mkdir({str(marker)!r})", f"[__import__('os').mkdir({str(marker)!r})]"):
        assert task.score(prompt, f"<answer>{code}</answer>").reward < 0.1
    assert not marker.exists()


def test_an_answer_that_hangs_the_scorer_is_no_zero_and_the_next_one_is_scored() -> None:
    task = task_of("reasoning_gym/puzzle24")
    prompt = task.prompt("train", 0)

    with pytest.raises(GymError, match=r"puzzle24: it passed its limit of (processor time|memory)"):
        task.score(prompt, "<answer>factorial(9**9**2)</answer>")
    gold = task.gold_reply(prompt)
    assert gold is not None
    assert task.score(prompt, gold).reward == 1.0


def test_what_the_library_raises_is_no_zero() -> None:
    own = Library(most=1)
    with pytest.raises(GymError, match="reasoning-gym n_queens: KeyError"):
        own.ask(Judge("n_queens", {}, {"question": "", "answer": None, "metadata": {}}, "1"))
    assert own.ask(Make("puzzle24", {}, 0, False, 0))["question"]
    own.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": "chain_sums"}, "no environment 'chain_sums'; did you mean chain_sum?"),
        ({"environment": "chain_sum", "config": {"terms": 3}}, "config must suit chain_sum.*unexpected keyword"),
        ({"environment": "chain_sum", "config": {"min_terms": 9}}, "config must suit chain_sum.*max_terms"),
        ({"environment": "chain_sum", "config": {"seed": 3}}, "without seed and size"),
        ({"environment": "chain_sum", "threshold": 2}, r"threshold must be a number in \(0, 1\]"),
        ({"environment": "chain_sum", "instruction": "Answer."}, "instruction must show <answer>"),
        ({}, "reasoning_gym is a gym: name an environment"),
    ],
)
def test_wrong_options_are_named(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        task_of("reasoning_gym", **options)


def test_an_absent_library_is_one_sentence_naming_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError, match=r"reasoning-gym must be installed; pip install 'echo2\[gyms\]'"):
        ReasoningGym(environment="chain_sum")


def test_a_gyms_environment_is_named_once_and_only_a_gym_has_some() -> None:
    with pytest.raises(ConfigError, match="names its environment already"):
        task_of("reasoning_gym/chain_sum", environment="chain_sum")
    with pytest.raises(ConfigError, match="arithmetic is no gym"):
        task_of("arithmetic/chain_sum")
    with pytest.raises(ConfigError, match="arithmetic must be a gym"):
        environment_names("arithmetic")


def test_a_prompt_holds_only_what_travels_and_the_fingerprint_the_library() -> None:
    task = task_of("reasoning_gym/arc_1d")
    prompt = task.prompt("eval", 3)

    assert json.loads(json.dumps(prompt.content))["question"] == prompt.content["question"]
    assert over_the_wire(prompt) == prompt
    assert task.fingerprint() != task_of("reasoning_gym/arc_1d", seed=5).fingerprint()

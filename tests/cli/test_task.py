from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from .conftest import Echo2


def test_tasks_are_listed(echo2: Echo2) -> None:
    assert {"arithmetic", "integer_answers"} <= set(echo2("task", "list", "--json").json["tasks"])
    assert "arithmetic" in echo2("task", "list").out.splitlines()


def test_prompts_are_shown_with_their_gold_replies(echo2: Echo2) -> None:
    shown = echo2("task", "show", "arithmetic", "-n", "2", "--split", "eval", "--json").json

    assert [prompt["prompt_id"] for prompt in shown["prompts"]] == ["arithmetic/eval/0", "arithmetic/eval/1"]
    assert shown["prompts"][0]["messages"][0]["role"] == "user"
    assert shown["prompts"][0]["gold_reply"] in echo2("task", "show", "arithmetic", "--split", "eval").out


@pytest.mark.parametrize(
    ("gold", "reply", "reward", "status"),
    [
        ("16", r"\boxed{016}", 1.0, "correct"),
        ("16", r"\boxed{-16}", 0.0, "wrong"),
        ("-5", "Answer: -5", 1.0, "correct"),
        ("7", r"First \boxed{5}. Wrong; so \boxed{7}.", 1.0, "correct"),
        ("5", r"First \boxed{5}. Wrong; so \boxed{7}.", 0.0, "wrong"),
        ("25", "", 0.0, "no_answer"),
        ("25", "The sum of 12 and 13 is computed. I think 25 is plausible but", 0.0, "no_answer"),
        ("25", "Answer: 25", 1.0, "correct"),
    ],
)
@pytest.mark.parametrize("task", ["arithmetic", "integer_answers", "maths", "aime24"])
def test_a_reply_is_scored_as_in_training_whatever_the_data(
    echo2: Echo2, task: str, gold: str, reply: str, reward: float, status: str
) -> None:
    done = echo2("task", "score", task, "--gold", gold, "--reply", reply, "--json")

    assert done.code == 0, done.err
    assert done.json == {"reward": reward, "status": status}


def test_a_reply_is_scored_to_one_of_the_tasks_prompts(echo2: Echo2) -> None:
    gold = echo2("task", "show", "arithmetic", "-n", "4", "--split", "eval", "--json").json["prompts"][3]["gold_reply"]
    done = echo2("task", "score", "arithmetic", "--index", "3", "--split", "eval", "--reply", gold, "--json")

    assert done.json == {"reward": 1.0, "status": "correct"}
    for more in ([], ["--gold", "3", "--index", "3"]):
        refused = echo2("task", "score", "arithmetic", "--reply", "3", *more)
        assert refused.code == 2
        assert "give either --gold or --index" in refused.faults[0]


def test_only_a_gym_has_environments_to_list(echo2: Echo2) -> None:
    done = echo2("task", "list", "arithmetic")

    assert done.code == 2
    assert "arithmetic must be a gym to have environments of its own" in done.faults[0]


@pytest.mark.timeout(300)
def test_the_environments_of_a_gym_are_tasks_by_name(echo2: Echo2) -> None:
    pytest.importorskip("reasoning_gym")

    assert "reasoning_gym/chain_sum" in echo2("task", "list", "reasoning_gym", "--json").json["tasks"]
    assert echo2("task", "check", "reasoning_gym/chain_sum", "-n", "5").code == 0
    unknown = echo2("task", "show", "reasoning_gym/chain_sums")
    assert unknown.code == 2
    assert "did you mean chain_sum?" in unknown.faults[0]


def test_an_unreadable_gold_is_the_users_mistake(echo2: Echo2) -> None:
    done = echo2("task", "score", "arithmetic", "--gold", "", "--reply", "3")

    assert done.code == 2
    assert "a gold answer must be an integer" in done.faults[0]


def test_a_task_is_checked_on_its_gold_answers(echo2: Echo2, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": f"{n}?", "answer": str(n)}) + "\n" for n in range(20)) + "{}\n")

    done = echo2("task", "check", "integer_answers", "--set", f"path={rows}", "--json")

    assert done.code == 0
    assert (done.json["ok"], done.json["checked"]) == (True, 20)
    assert "row 21" in done.json["excluded"][0]


@pytest.mark.timeout(300)
def test_an_expression_is_scored_by_what_it_means(echo2: Echo2) -> None:
    done = echo2("task", "score", "maths", "--gold", r"\frac{\sqrt{2}}{2}", "--reply", r"\boxed{1/\sqrt{2}}", "--json")

    assert done.json == {"reward": 1.0, "status": "correct"}
    refused = echo2("task", "score", "maths", "--gold", r"\frac{", "--reply", "3")
    assert refused.code == 2
    assert "must be one that can be compared" in refused.faults[0]


def test_a_task_that_fails_its_own_gold_answers_is_reported(
    echo2: Echo2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stingy.py").write_text(
        "from echo2.data.task import Score\n"
        "from echo2.data.tasks.arithmetic import Arithmetic\n"
        "class Stingy(Arithmetic):\n"
        "    def score(self, prompt, reply):\n"
        "        return Score(0.5, 'half')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    done = echo2("task", "check", "stingy:Stingy", "-n", "2")

    assert done.code == 1
    assert "must get reward 1, got 0.5 (half)" in done.out


def test_tokens_are_shown_in_order_with_those_that_bear_loss_marked(echo2: Echo2) -> None:
    shown = echo2("task", "show", "arithmetic", "-n", "1", "--model", "bytes", "--json").json["prompts"][0]
    gold = shown["gold_reply"]
    assert "".join(token["text"] for token in shown["tokens"] if token["loss"]) == f"{gold}<end>"
    lines = echo2("task", "show", "arithmetic", "-n", "1", "--model", "bytes").out.splitlines()
    assert lines[-3].endswith(f"{len(gold) + 1} of them sampled by the policy, which bear loss (▸):")
    assert lines[-2].startswith("  · '<start>' 'u' 's' 'e' 'r'")
    assert lines[-1].split() == ["▸", *(repr(digit) for digit in gold), "'<end>'"]


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
def test_a_whole_game_is_shown_turn_by_turn(echo2: Echo2, sandbox: str) -> None:
    arguments = ("task", "show", "sandbox", "-n", "4", "--model", "bytes", "--set", f"sandbox={sandbox}")
    prompts = echo2(*arguments, "--json").json["prompts"]
    longest = max(prompts, key=lambda view: len(view["gold_turns"]))
    roles = [message["role"] for message in longest["gold_turns"]]
    assert len(roles) > 2
    assert roles == ["assistant", "user"] * (len(roles) // 2) + ["assistant"]
    said = "".join(message["content"] + "<end>" for message in longest["gold_turns"] if message["role"] == "assistant")
    assert "".join(token["text"] for token in longest["tokens"] if token["loss"]) == said.replace("\n", "<0x0A>")
    out = echo2(*arguments).out
    assert out.count("\ngold: ") == sum(len(view["gold_turns"]) // 2 + 1 for view in prompts)
    assert out.count("\n  ▸ ") == out.count("\ngold: ")


def test_a_reply_to_a_prompt_of_the_task_is_scored(echo2: Echo2) -> None:
    gold = echo2("task", "show", "arithmetic", "-n", "3", "--json").json["prompts"][2]["gold_reply"]
    assert echo2("task", "score", "arithmetic", "--index", "2", "--reply", gold).out == "1 correct\n"
    assert echo2("task", "score", "sandbox", "--index", "0", "--reply", "Action: dance").out.startswith("0 ")
    for wrong in ((), ("--index", "1", "--gold", "5")):
        refused = echo2("task", "score", "arithmetic", "--reply", "5", *wrong)
        assert refused.code == 2 and "either --gold or --index" in refused.faults[0]


def test_a_scorer_that_raises_is_told_in_a_sentence(
    echo2: Echo2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "touchy.py").write_text(
        "from echo2.data.tasks.arithmetic import Arithmetic\n"
        "class Touchy(Arithmetic):\n"
        "    def score(self, prompt, reply):\n"
        "        raise KeyError('a field')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    refused = echo2("task", "score", "touchy:Touchy", "--index", "0", "--reply", "5")
    assert refused.code == 2
    assert "a reply to touchy:Touchy/train/0 cannot be scored: KeyError: 'a field' (" in refused.faults[0]
    assert "touchy.py, line 4); in a run its row fails" in refused.faults[0]


def test_unknown_tasks_splits_and_options_are_the_users_mistakes(echo2: Echo2) -> None:
    assert "must be one of aime24, arithmetic" in echo2("task", "show", "arithmetics").faults[0]
    assert "--split must be train or eval" in echo2("task", "show", "arithmetic", "--split", "test").faults[0]
    assert "has no option 'digits'" in echo2("task", "show", "arithmetic", "--set", "digits=2").faults[0]


def test_a_task_that_reads_its_file_too_early_could_not_be_made_by_a_worker(
    echo2: Echo2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "eager.py").write_text(
        "from pathlib import Path\n"
        "from echo2.data.tasks.arithmetic import Arithmetic\n"
        "class Eager(Arithmetic):\n"
        "    def __init__(self, path):\n"
        "        super().__init__()\n"
        "        self.text = Path(path).read_text()\n"
        "class Later(Arithmetic):\n"
        "    def __init__(self, path):\n"
        "        super().__init__()\n"
        "        self.path = path\n"
        "    def messages(self, prompt):\n"
        "        return [{'role': 'user', 'content': Path(self.path).read_text()}]\n"
    )
    (tmp_path / "rows.txt").write_text("rows")
    monkeypatch.syspath_prepend(str(tmp_path))

    done = echo2("task", "check", "eager:Eager", "-n", "2", "--set", f"path={tmp_path / 'rows.txt'}")
    assert done.code == 1
    assert "a worker must be able to make the task without its files, read them when a prompt is first" in done.out
    done = echo2("task", "check", "eager:Later", "-n", "2", "--set", f"path={tmp_path / 'rows.txt'}")
    assert done.code == 1
    assert "messages must follow from the prompt on a machine without files, got" in done.out
    assert "FileNotFoundError" in done.out


def test_a_check_plays_the_episodes_of_a_game(echo2: Echo2) -> None:
    done = echo2("task", "check", "sandbox", "-n", "2", "--set", "sandbox=moba", "--json")

    assert (done.code, done.json["episodes"], done.json["faults"]) == (0, 20, [])
    assert "4 gold replies checked, 20 episodes played, 0 faults" in (
        echo2("task", "check", "sandbox", "-n", "2", "--set", "sandbox=moba").out
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (
            ["arithmetic", "--set", "style"],
            "--set must have the form option=value, got `style`; for example --set path=",
        ),
        (["arithmetic", "--set", "style=[1"], "--set style= must be followed by a TOML value, got `style=[1`"),
        (
            ["reasoning_gym"],
            "reasoning_gym is a gym: name an environment, reasoning_gym/NAME; echo2 task list reasoning_gym",
        ),
        (["echo2.data.sandbox.moba.game:LaneDuel"], "a game is an option of a task: sandbox with sandbox=echo2.data."),
    ],
)
def test_what_was_typed_is_named_as_it_was_typed(echo2: Echo2, arguments: list[str], told: str) -> None:
    done = echo2("task", "check", *arguments)

    assert done.code == 2
    assert told in done.faults[0]


HOSTILE = """
import os, sys
from echo2.data.task import Score, Task
from echo2.data.tasks.arithmetic import Arithmetic

print("read")

class Loud(Arithmetic):
    def score(self, prompt, reply):
        print("scoring")
        return super().score(prompt, reply)

class Ends(Arithmetic):
    def score(self, prompt, reply):
        sys.exit(0)

class Unborn(Arithmetic):
    def __init__(self):
        sys.exit(0)

class Empty(Task):
    pass

class NoNumber(Arithmetic):
    def score(self, prompt, reply):
        return Score(float("nan"), "x")

class Wordless(Arithmetic):
    def messages(self, prompt):
        return None

class Lost(Arithmetic):
    def prompt(self, split, index):
        return {"gold": 1}

class Sized(Arithmetic):
    def size(self, split):
        raise OSError("disk")
"""


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hostile_tasks.py").write_text(HOSTILE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "hostile_tasks", raising=False)


@pytest.mark.usefixtures("hostile")
def test_what_a_task_prints_stays_out_of_the_commands_own_output(echo2: Echo2) -> None:
    done = echo2("task", "score", "hostile_tasks:Loud", "--gold", "5", "--reply", "5", "--json")
    assert done.json == {"reward": 1.0, "status": "correct"}
    assert done.err.split() == ["read", "scoring"]


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Ends", "cannot be scored: SystemExit: 0"),
        ("Unborn", "must take its options, it raised SystemExit: 0"),
        ("Empty", "it raised TypeError: Can't instantiate abstract class Empty"),
        ("NoNumber", "cannot be scored: a reward must be finite, got nan"),
        ("Lost", "must give prompt train/0 as a Prompt, got dict"),
        ("Sized", "must give the size of split train, it raised OSError: disk"),
        ("Nobody", "must be importable here: module 'hostile_tasks' has no attribute 'Nobody'"),
    ],
)
def test_a_faulty_task_is_its_authors_mistake_told_in_a_sentence(echo2: Echo2, task: str, words: str) -> None:
    refused = echo2("task", "score", f"hostile_tasks:{task}", "--index", "0", "--reply", "5")
    assert refused.code == 2
    assert words in refused.err.splitlines()[-1]
    assert "Traceback" not in refused.err and not refused.out


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize(
    ("task", "words"),
    [
        ("Ends", "hostile_tasks:Ends/eval/0: a reply to hostile_tasks:Ends/eval/0 cannot be scored: SystemExit: 0"),
        ("Wordless", "hostile_tasks:Wordless/train/1: task hostile_tasks:Wordless must give the messages of"),
        ("Lost", "train/1: task hostile_tasks:Lost must give prompt train/1 as a Prompt"),
    ],
)
def test_a_check_names_every_prompt_that_its_task_breaks_down_at(echo2: Echo2, task: str, words: str) -> None:
    done = echo2("task", "check", f"hostile_tasks:{task}", "-n", "2")
    assert done.code == 1
    assert "4 faults" in done.out and words in done.out


@pytest.mark.usefixtures("hostile")
def test_prompts_that_cannot_be_shown_are_told_in_a_sentence(echo2: Echo2) -> None:
    refused = echo2("task", "show", "hostile_tasks:Wordless")
    assert refused.code == 2
    assert "must give the messages of hostile_tasks:Wordless/train/0 as a list" in refused.err.splitlines()[-1]


def test_a_reply_that_is_no_utf_8_is_read_as_a_workers_tokens_are(echo2: Echo2) -> None:
    broken = b"\\boxed{5\xff}".decode("utf-8", "surrogateescape")
    done = echo2("task", "score", "maths", "--gold", "5", "--reply", broken, "--json")
    assert done.code == 0, done.err
    assert done.json["reward"] == 0.0

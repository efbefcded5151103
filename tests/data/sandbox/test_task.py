from __future__ import annotations

import sys
import tomllib
from collections import Counter
from itertools import accumulate, groupby
from pathlib import Path
from typing import ClassVar

import pytest
from chat_tokenizer import PLAIN, save_tokenizer
from games import CHAT, NOW, Sampler, StubClock, calls, games, ids, mask, sandbox_task

from echo2.config.sections import TaskSection
from echo2.data.inspect import check, show
from echo2.data.registry import load_task
from echo2.data.sandbox.log import encode_logs, messages_of, read_logs
from echo2.data.sandbox.sandbox import Outcome, Turn
from echo2.data.template_chat import TemplateChat
from echo2.errors import ConfigError
from echo2.rollout.episode import run_group
from echo2.transport.messages import LeaseGrant
from echo2.types import RowStatus, Sampling

THOUGHT = "<think>\nThey are weak.\n</think>\n\n"


def thinks(prompt: str) -> str:
    return THOUGHT + calls(prompt)


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
async def test_b03_b10_a_games_ids_are_those_that_were_fed_and_sampled_turn_by_turn(sandbox: str) -> None:
    """Thoughts stay in the history, each turn extends the last, and only sampled ids carry loss."""
    task = sandbox_task(sandbox=sandbox)
    engine = Sampler(thinks)
    (trajectory,) = await games(task, task.prompt("train", 1), engine)
    assert len(engine.fed) > 2
    for fed, gave, after in zip(engine.fed, engine.gave, engine.fed[1:], strict=False):
        assert after[: len(fed) + len(gave)] == fed + gave
    assert ids(trajectory) == engine.fed[-1] + engine.gave[-1]
    carried = [token for token, sampled in zip(ids(trajectory), mask(trajectory), strict=True) if sampled]
    assert carried == [token for gave in engine.gave for token in gave]


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
@pytest.mark.parametrize("template", ["bytes", "chatml"])
async def test_the_papers_turn_mask_is_ours_but_for_what_the_template_writes(
    sandbox: str, template: str, tmp_path: Path
) -> None:
    """m_t = 1[c_t > 1]·1[c_t odd], c_t the count of turn starts (Appendix D).

    It assumes one system turn, strict alternation and no other turn start. Then it marks all of our tokens, and beside
    them the header of each reply and the line end after it, which the template wrote and nobody sampled.
    """
    chat = CHAT if template == "bytes" else TemplateChat(save_tokenizer(tmp_path, PLAIN))
    task = sandbox_task(sandbox=sandbox)
    (trajectory,) = await games(task, task.prompt("train", 2), Sampler(thinks, chat=chat))
    tokens, ours = ids(trajectory), mask(trajectory)
    start = tokens[0]
    counts = accumulate(token == start for token in tokens)
    papers = [count > 1 and count % 2 == 1 for count in counts]
    assert all(paper for paper, own in zip(papers, ours, strict=True) if own)
    surplus = groupby(zip(tokens, papers, ours, strict=True), key=lambda row: row[1] and not row[2])
    texts = {"".join(chat.piece(row[0]) for row in rows) for beside, rows in surplus if beside}
    headers = {"bytes": {"<start>assistant<0x0A>"}, "chatml": {"<|im_start|>assistant\n<think>\n\n</think>\n\n", "\n"}}
    assert texts == headers[template]
    assert sum(ours) > 0


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
@pytest.mark.parametrize("template", ["bytes", "chatml"])
async def test_what_is_shown_of_a_game_are_the_tokens_and_the_mask_of_its_record(
    sandbox: str, template: str, tmp_path: Path
) -> None:
    chat = CHAT if template == "bytes" else TemplateChat(save_tokenizer(tmp_path, PLAIN))
    task = sandbox_task(sandbox=sandbox)
    for index in range(3):
        shown = show(task, chat, index)
        said = [message["content"] for message in shown.turns if message["role"] == "assistant"]
        (trajectory,) = await games(task, task.prompt("train", index), Sampler(*said, chat=chat))
        assert [row.token_id for row in shown.tokens] == ids(trajectory)
        assert [row.sampled for row in shown.tokens] == mask(trajectory)


async def test_b05_what_happened_between_two_turns_is_one_message_in_rollout_and_training() -> None:
    """An opponent's action and a board card arrive together."""
    task = sandbox_task(opponents=["maniac"])
    engine = Sampler(calls)
    for index in range(6):
        (trajectory,) = await games(task, task.prompt("train", index), engine)
        given = [CHAT.decode(segment.tokens.tolist()) for segment in trajectory.segments if not segment.sampled]
        assert all(text.count("user\n") == 1 for text in given)
    together = [text for fed in engine.fed if "Board: [" in (text := CHAT.decode(fed)) and ": bet " in text]
    assert together


async def test_b01_what_an_opponent_says_reaches_the_policy_only_as_what_was_done() -> None:
    task = sandbox_task(opponents=[{"name": "forger", "model": "games:Forger"}])
    engine = Sampler(calls)
    prompt = next(p for i in range(50) if (p := task.prompt("train", i)).content["seat"] == 0)
    (trajectory,) = await games(task, prompt, engine)
    assert len(engine.gave) > 2
    assert "I fold" not in CHAT.decode(ids(trajectory))
    assert ids(trajectory).count(CHAT.START) == 2 * len(engine.gave) + 1


class Mute:
    """An opponent that answers nothing."""

    async def __call__(self, messages: object) -> object:
        return None


class Bankrupt:
    def __init__(self) -> None:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("Mute", "an opponent must answer with a text, got NoneType"),
        ("Bankrupt", "must take its options, it raised SystemExit: 3"),
        ("Nobody", "must be importable here"),
    ],
)
async def test_an_opponent_that_cannot_play_fails_the_game_and_nobody_wins_it(model: str, words: str) -> None:
    task = sandbox_task(opponents=[{"name": "other", "model": f"{__name__}:{model}"}])
    prompt = next(p for i in range(50) if (p := task.prompt("train", i)).content["seat"] == 0)
    lease = LeaseGrant("lease", 1, 1, prompt, (0,), Sampling(1.0, 1.0, 64, 0), NOW, 60.0, "train")
    (row,) = await run_group(Sampler(calls), task, CHAT, lease, False, StubClock())  # type: ignore[arg-type]
    assert row.status is RowStatus.ERROR
    assert words in row.error


class Endless:
    """Both seats are asked for ever, seat 1 by a rule that never waits."""

    seats, rules, currency, default_rule, fault_cost = 2, "Go on.", "chips", "nothing happens", 1.0
    measure = ("chips", 1.0)
    bots: ClassVar = {"on": lambda view, draw: "on"}

    def reset(self, seed: int) -> Turn:
        return Turn(1, "on?", None, "on")

    def step(self, reply: str) -> Outcome:
        return Outcome("on", Turn(1, "on?", None, "on"))

    def gain(self, seat: int) -> float:
        return 0.0

    def likeness(self, seat: int) -> str:
        return ""


async def test_a_game_that_does_not_end_is_given_up_in_time() -> None:
    """I7: rule bots never wait for anything, so nothing but the game itself could let the clock be heard."""
    task = sandbox_task(sandbox=f"{__name__}:Endless", opponents=["on"])
    prompt = next(p for i in range(50) if (p := task.prompt("train", i)).content["seat"] == 0)
    lease = LeaseGrant("lease", 1, 1, prompt, (0,), Sampling(1.0, 1.0, 64, 0), NOW, 0.05, "train")
    (row,) = await run_group(Sampler(calls), task, CHAT, lease, False, StubClock())  # type: ignore[arg-type]
    assert row.status is RowStatus.TIMEOUT


async def test_g09_a_reply_that_is_no_action_costs_is_asked_again_and_then_the_default_is_taken() -> None:
    task = sandbox_task(opponents=["rock"])
    prompt = next(p for i in range(50) if (p := task.prompt("train", i)).content["seat"] == 0)
    (once,) = await games(task, prompt, Sampler("I won't raise 100, I fold", "Action: fold"))
    assert (once.reward, once.omega["rewards"], once.omega["faults"]) == (-3.0, [-2.0, -1.0], 1)
    (twice,) = await games(task, prompt, Sampler("je me couche", "bet 30"))
    assert (twice.reward, twice.omega["rewards"], twice.omega["faults"]) == (-5.0, [-2.0, -3.0], 2)
    (fold,) = await games(task, prompt, Sampler("FOLD."))
    assert (fold.reward, fold.omega["faults"]) == (-1.0, 0)
    strict = sandbox_task(opponents=["rock"], retries=0)
    (told,) = await games(strict, prompt, Sampler("", calls))
    assert (told.reward, told.omega["gain"], told.omega["rewards"]) == (-3.0, -1.0, [-3.0])


async def test_a_dearer_fault_costs_reward_and_no_chips() -> None:
    """Three big blinds for the fault; the fold after it costs the small blind."""
    task = sandbox_task(opponents=["rock"], retries=0, fault_price=3)
    prompt = next(p for i in range(50) if (p := task.prompt("train", i)).content["seat"] == 0)
    (told,) = await games(task, prompt, Sampler("", calls))
    assert (told.reward, told.omega["gain"], told.omega["faults"]) == (-7.0, -1.0, 1)
    assert "no legal action costs 6 chips" in task.messages(prompt)[0]["content"]
    assert task.fingerprint() != sandbox_task(opponents=["rock"], retries=0).fingerprint()


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
async def test_a_group_plays_one_game_and_its_rewards_sum_to_the_return(sandbox: str) -> None:
    task = sandbox_task(sandbox=sandbox)
    for index in range(4):
        records = await games(task, task.prompt("train", index), Sampler(calls), count=3)
        assert len({record.reward for record in records}) == 1
        assert {sum(record.omega["rewards"]) for record in records} == {records[0].reward}


async def test_a_game_without_a_turn_of_the_policy_is_counted_and_another_is_played() -> None:
    """The maniac on the button sometimes folds at once: the big blind has won, and nobody was asked."""
    task = sandbox_task(opponents=["maniac"])
    walks = []
    for index in range(60):
        prompt = task.prompt("train", index)
        (trajectory,) = await games(task, prompt, Sampler("Action: fold", calls))
        assert trajectory.sampled_tokens > 0
        if trajectory.omega["deals"] > 1:
            walks.append((prompt.content["seat"], trajectory.omega["gain"]))
    assert walks and set(walks) == {(1, 1.0)}


def test_held_out_deals_are_played_from_every_seat_against_every_opponent() -> None:
    task = sandbox_task(settings={"seats": 3}, opponents=["rock", "counter"])
    prompts = [task.prompt("eval", index).content for index in range(12)]
    assert len({prompt["deal"] for prompt in prompts}) == 2
    assert Counter(tuple(prompt["players"]) for prompt in prompts) == {
        tuple([name] * seat + ["policy"] + [name] * (2 - seat)): 2 for name in ("rock", "counter") for seat in range(3)
    }
    trained = {task.prompt("train", index).content["deal"] for index in range(200)}
    assert not trained & {prompt["deal"] for prompt in prompts}


def test_opponents_are_drawn_by_weight_and_seed() -> None:
    task = sandbox_task(opponents=["rock", {"name": "maniac", "weight": 3}])
    drawn = Counter(name for i in range(400) for name in task.prompt("train", i).content["players"] if name != "policy")
    assert 250 < drawn["maniac"] < 350
    assert drawn["rock"] + drawn["maniac"] == 400
    assert task.prompt("train", 7) == sandbox_task(opponents=["rock", {"name": "maniac", "weight": 3}]).prompt(
        "train", 7
    )


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
def test_the_gold_reply_is_the_teachers_action_and_legal(sandbox: str) -> None:
    task = load_task(TaskSection(name="sandbox", options={"sandbox": sandbox}))
    assert check(task, 12).passed
    prompt = task.prompt("train", 0)
    assert task.score(prompt, "I fold, or maybe not").reward == 0.0
    assert [message["role"] for message in task.messages(prompt)] == ["system", "user"]


async def test_messages_open_the_game_as_it_is_played() -> None:
    task = sandbox_task()
    for index in range(5):
        prompt, engine = task.prompt("train", index), Sampler(calls)
        await games(task, prompt, engine)
        assert engine.fed[0] == CHAT.render(task.messages(prompt), thinking=False)


async def test_recorded_games_train_as_off_policy_data(tmp_path: Path) -> None:
    """A rule bot's log: its text is what is learned, without log-probs, and Ω says whose it was."""
    logs = [log async for log in sandbox_task(opponents=["rock", "counter"], logs_together=2).record(6)]
    path = tmp_path / "logs.jsonl"
    path.write_bytes(encode_logs(logs))
    assert list(read_logs(path)) == logs
    task = sandbox_task(logs_path=str(path), logs_together=2)
    assert task.size("train") == (len(logs) + 1) // 2
    logs.sort(key=lambda log: (log.seed, log.seat))
    prompt = task.prompt("train", 0)
    engine = Sampler()
    first, second = await games(task, prompt, engine, count=2)
    assert engine.fed == []
    assert {first.omega["recorded"], second.omega["recorded"]} <= {"rock", "counter"}
    assert first.logprob_convention is None
    assert first.reward == pytest.approx(logs[0].total)
    said = [CHAT.decode(segment.tokens.tolist()) for segment in first.segments if segment.sampled]
    assert said == [entry.action for entry in logs[0].entries]
    assert first.normalisation_key is not None
    roles = [message["role"] for message in messages_of(logs[0])]
    assert roles == ["system", *["user", "assistant"] * len(logs[0].entries)]
    told = messages_of(logs[0], with_rewards=True)[3::2]
    assert [text["content"].split("\n")[0] for text in told if text["role"] == "user"] == [
        f"Reward: {entry.reward:g}" for entry in logs[0].entries[:-1]
    ]
    assert check(task, 2).passed


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sandbox": "pokr"}, "one of poker, moba or module:Class"),
        ({"sandbox": "no.such:Game"}, "must be importable"),
        ({"normalise": "hand"}, "normalise must be one of deal, similar, batch"),
        ({"retries": -1}, "retries must be an integer"),
        ({"fault_price": 0}, "fault_price must be a number above 0"),
        ({"fault_price": True}, "fault_price must be a number above 0"),
        ({"opponents": ["rok"]}, "must be one of rock, maniac, counter"),
        ({"opponents": [{"name": "rock", "wieght": 2}]}, "wieght"),
        ({"opponents": [{"name": "rock", "weight": 0}]}, "weight must be above 0"),
        ({"opponents": ["rock", "rock"]}, "different names"),
        ({"teacher": "hero"}, "teacher must be one of"),
        ({"settings": {"brief": 1}}, "brief must be true or false"),
        ({"sandbox": "moba", "settings": {"brief": 1}}, "brief must be true or false"),
    ],
)
def test_wrong_options_are_told_in_a_sentence(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        sandbox_task(**options)


def test_a_missing_pokerkit_is_told_with_its_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("echo2.data.sandbox.poker")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pokerkit", None)
    with pytest.raises(ConfigError, match=r"pip install 'echo2\[poker\]'"):
        sandbox_task()


def test_a_fingerprint_covers_the_game_and_its_options() -> None:
    task = sandbox_task()
    assert task.fingerprint() == sandbox_task().fingerprint()
    assert len({t.fingerprint() for t in (task, sandbox_task(sandbox="moba"), sandbox_task(retries=2))}) == 3
    assert {"echo2.data.sandbox.poker.pots", "echo2.data.sandbox.play"} <= set(task.judging_modules())
    assert all(name in sys.modules for name in task.judging_modules())


def test_poker_becomes_moba_by_one_line() -> None:
    folder = Path(__file__).parents[3] / "examples" / "games"
    poker, moba = ((folder / name).read_text().splitlines() for name in ("poker.toml", "moba.toml"))
    assert [pair for pair in zip(poker, moba, strict=True) if pair[0] != pair[1]] == [
        ('sandbox = "poker"', 'sandbox = "moba"')
    ]
    for lines in (poker, moba):
        (table,) = tomllib.loads("\n".join(lines))["tasks"]
        assert load_task(TaskSection(**table)).prompt("train", 0).content["players"]


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
@pytest.mark.parametrize("teacher", ["", "chance"])
async def test_a_gold_talk_is_the_game_that_an_episode_with_the_same_replies_is(sandbox: str, teacher: str) -> None:
    task = sandbox_task(sandbox=sandbox, teacher=teacher)
    turns = 0
    for index in range(6):
        prompt = task.prompt("train", index)
        talk = task.gold_talk(prompt)
        assert talk is not None
        replies = [message["content"] for message in talk if message["role"] == "assistant"]
        assert replies[0] == task.gold_reply(prompt)
        engine = Sampler(*replies)
        (trajectory,) = await games(task, prompt, engine)
        assert (len(engine.gave), trajectory.omega["faults"]) == (len(replies), 0)
        assert engine.fed[0] == CHAT.render(talk[:2], thinking=False)
        turns = max(turns, len(replies))
    assert turns > 1


@pytest.mark.parametrize("sandbox", ["poker", "moba"])
async def test_a_brief_game_asks_in_a_line_and_plays_the_same(sandbox: str) -> None:
    briefly, long = (sandbox_task(sandbox=sandbox, settings={"brief": brief}) for brief in (True, False))
    short, full = (task.messages(task.prompt("train", 0)) for task in (briefly, long))
    assert "\n" not in short[1]["content"]
    assert sum(len(m["content"]) for m in short) < 0.5 * sum(len(m["content"]) for m in full)
    for index in range(3):
        (one,), (other,) = [
            await games(task, task.prompt("train", index), Sampler("farm" if sandbox == "moba" else "all-in", "call"))
            for task in (briefly, long)
        ]
        assert one.reward == other.reward


def test_chance_teaches_every_kind_of_legal_reply() -> None:
    task = sandbox_task(sandbox="moba", teacher="chance", settings={"brief": True})
    assert {task.gold_reply(task.prompt("train", i)) for i in range(60)} == {
        "farm",
        "harass",
        "siege",
        "retreat",
        "hold",
    }
    poker = sandbox_task(teacher="chance", settings={"brief": True, "stack": 4})
    said = {(poker.gold_reply(poker.prompt("train", i)) or "").split()[0] for i in range(60)}
    assert said == {"fold", "check", "call", "raise", "all-in"}
    assert check(poker, 40).passed

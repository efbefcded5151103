"""``echo2 task list | show | check | score | record``: look at a task without a model or a run."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo2.cli.output import JsonFlag, aside, print_json
from echo2.cli.waiting import hang_named
from echo2.errors import ConfigError, UserError

if TYPE_CHECKING:
    from echo2.config.sections import TaskSection
    from echo2.data.chat import ChatFormat
    from echo2.data.task import Split, Task
    from echo2.types import Prompt

app = typer.Typer(help="Look at a task's prompts, check it on its gold answers, score a reply.", no_args_is_help=False)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A registered task, gym/environment, or module:Class.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Option of the task, e.g. path=rows.jsonl; repeatable."),
]
SplitOption = Annotated[str, typer.Option("--split", help="train or eval.")]

SHOWN_ROWS = 20
LOSS, NO_LOSS = "▸", "·"
_SPLITS: tuple[Split, ...] = ("train", "eval")
_PLACE = "tasks.0.options."


@app.command("list")
def list_tasks(
    family: Annotated[
        str | None, typer.Argument(metavar="[GYM]", help="A gym, whose environments are then listed.")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Registered tasks, or the environments of a gym that are installed here."""
    from echo2.data.registry import environment_names, task_names

    names = task_names() if family is None else environment_names(family)
    print_json({"tasks": names}) if as_json else print("\n".join(names))


@app.command("show")
def show(
    name: Name,
    options: Options = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Prompts to show.")] = 3,
    split: SplitOption = "train",
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH",
            help="Model whose tokens and loss mask to show: a directory, a hub id or package:NAME; bytes for none.",
        ),
    ] = None,
    thinking: Annotated[bool, typer.Option("--thinking", help="Render the template with thinking on.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Show prompts as the model gets them with a good policy's replies, of games a whole game; with --model, token by
    token, those that bear loss marked."""
    from echo2.data import given

    chosen = _split(split)
    with aside(), hang_named():
        task = _task(name, options)
        chat = _chat(model)
        size = given.size(task, chosen)
        shown = [_view(task, chat, chosen, index, thinking) for index in _indices(size, count)]
    if not shown:
        raise UserError(f"task {name} must have prompts of the split {split} to show, it has none")
    if as_json:
        print_json({"task": name, "split": split, "size": size, "prompts": shown})
    else:
        print("\n\n".join(_text(view) for view in shown))


@app.command("check")
def check(
    name: Name,
    options: Options = None,
    count: Annotated[int, typer.Option("--count", "-n", min=1, help="Prompts of each split to check.")] = 200,
    as_json: JsonFlag = False,
) -> None:
    """Check a task on its own prompts: made again they are the same, gold replies get full marks and empty ones do
    not, a machine without its files judges alike, episodes of several turns are as their gold talks say; exit code 1
    unless all of that holds."""
    from echo2.data import inspect
    from echo2.data.gold_episode import check_episodes
    from echo2.data.registry import load_task

    with aside(), hang_named():
        section = _section(name, options)
        task = load_task(section)
        faults: list[str] = []
        worker = _elsewhere(section, faults)
        found = {split: inspect.check(task, count, split=split, worker=worker) for split in _SPLITS}
        episodes = [asyncio.run(check_episodes(task, split=split, worker=worker)) for split in _SPLITS]
    failures = [*(checked.failures for checked in found.values()), *(failed for _, failed in episodes)]
    faults += [f"{prompt_id}: {sentence}" for some in failures for prompt_id, sentence in some]
    facts = {
        "ok": not faults and any(checked.passed for checked in found.values()),
        "task": name,
        "checked": sum(checked.checked for checked in found.values()),
        "without_gold": sum(checked.without_gold for checked in found.values()),
        "episodes": sum(played for played, _ in episodes),
        "excluded": [str(row) for row in getattr(task, "excluded", [])],
        "faults": faults,
    }
    print_json(facts) if as_json else print(_verdict(facts))
    if not facts["ok"]:
        raise typer.Exit(1)


@app.command("score")
def score(
    name: Name,
    reply: Annotated[str, typer.Option("--reply", help="The reply to score.")],
    gold: Annotated[str | None, typer.Option("--gold", help="The right answer.")] = None,
    index: Annotated[
        int | None, typer.Option("--index", min=0, help="The prompt of the task that it replies to, instead of --gold.")
    ] = None,
    split: SplitOption = "train",
    options: Options = None,
    as_json: JsonFlag = False,
) -> None:
    """Score one reply against a gold answer, or as the reply to one of the task's prompts, as training does."""
    from echo2.data import given

    if (gold is None) == (index is None):
        raise typer.BadParameter("give either --gold or --index, to say what the reply is a reply to")
    chosen = _split(split)
    with aside(), hang_named():
        task = _task(name, options)
        prompt = given.prompt_for_gold(task, gold) if gold is not None else _prompt(task, chosen, index or 0)
        judged = given.score(task, prompt, _text_of(reply))
    print_json({"reward": judged.reward, "status": judged.status}) if as_json else print(
        f"{judged.reward:g} {judged.status}"
    )


@app.command("record")
def record(
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="File to write; it must not exist.")],
    options: Options = None,
    games: Annotated[int, typer.Option("--games", "-n", min=1, help="Games to play.")] = 100,
    as_json: JsonFlag = False,
) -> None:
    """Let the opponents of the task `sandbox` play each other, and record their games to train on."""
    from echo2.data.sandbox.log import GameLog, encode_logs
    from echo2.data.sandbox.task import SandboxTask

    async def played(task: SandboxTask) -> list[GameLog]:
        return [log async for log in task.record(games)]

    with aside(), hang_named():
        task = _task("sandbox", options)
        assert isinstance(task, SandboxTask), "the task registered as sandbox"
        logs = asyncio.run(played(task))
    try:
        with out.open("xb") as file:
            file.write(encode_logs(logs))
    except OSError as error:
        raise UserError(
            f"OUT.jsonl must be a new file that can be written, got {str(out)!r}: {error.strerror}"
        ) from error
    turns = sum(len(log.entries) for log in logs)
    facts = {"games": games, "logs": len(logs), "turns": turns, "file": str(out)}
    print_json(facts) if as_json else print(f"{out}: {games} games, {len(logs)} logs of a seat, {turns} turns")


def _task(name: str, options: list[str] | None) -> Task:
    from echo2.data.registry import load_task

    return load_task(_section(name, options))


def _section(name: str, options: list[str] | None) -> TaskSection:
    """Raises ConfigError in the words of the command, where an option is named without its place in a run's file."""
    from echo2.config.load import build_config

    if wrong := [option for option in options or [] if not option.partition("=")[1]]:
        raise UserError(f"--set must have the form option=value, got `{wrong[0]}`; for example --set path=rows.jsonl")
    tables: dict[str, Any] = {"rollout": {"engine": "scripted"}, "tasks": [{"name": name}]}
    try:
        return build_config(tables, [f"{_PLACE}{option}" for option in options or []]).tasks[0]
    except ConfigError as error:
        raise ConfigError([fault.replace(_PLACE, "") for fault in error.faults]) from error


def _elsewhere(section: TaskSection, faults: list[str]) -> Task | None:
    """The task on a machine without its files, if it has any; adds to ``faults`` where it cannot be made there."""
    from echo2.data.registry import load_elsewhere

    try:
        return load_elsewhere(section)
    except ConfigError as error:
        cure = "read them when a prompt is first asked for"
        faults.append(f"a worker must be able to make the task without its files, {cure}; {error}")
        return None


def _split(name: str) -> Split:
    if name == "train":
        return "train"
    if name == "eval":
        return "eval"
    raise typer.BadParameter(f"--split must be train or eval, got {name}")


def _indices(size: int | None, count: int) -> range:
    return range(count if size is None else min(count, size))


def _prompt(task: Task, split: Split, index: int) -> Prompt:
    from echo2.data import given

    size = given.size(task, split)
    if size is not None and index >= size:
        raise UserError(f"--index must be below the {size} prompts of the split {split}, got {index}")
    return given.prompt(task, split, index)


def _text_of(argument: str) -> str:
    """An argument's bytes as text, read as a reply's tokens are: what is no UTF-8 becomes U+FFFD."""
    return argument.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _chat(model: str | None) -> ChatFormat | None:
    if model is None:
        return None
    if model == "bytes":
        from echo2.data.chat import ByteChat

        return ByteChat()
    from echo2.data.template_chat import TemplateChat

    folder = Path(model)
    if not folder.is_dir():
        from echo2.config.sections import ModelSection
        from echo2.learning.pretrained import TINY_PREFIX, resolve_model

        if model.startswith(TINY_PREFIX):
            raise UserError(
                f"--model must name a model that exists, got {model}: a run makes it in its folder's model/"
            )
        folder = resolve_model(ModelSection(path=model), folder)
    return TemplateChat(folder)


def _view(task: Task, chat: ChatFormat | None, split: Split, index: int, thinking: bool) -> dict[str, Any]:
    from echo2.data import given, inspect

    prompt = given.prompt(task, split, index)
    view: dict[str, Any] = {
        "prompt_id": prompt.prompt_id,
        "messages": [dict(message) for message in given.messages(task, prompt)],
        "gold_reply": given.gold_reply(task, prompt),
        "gold_turns": [dict(message) for message in inspect.gold_turns(task, prompt)],
    }
    if chat is not None:
        rows = inspect.show(task, chat, index, split=split, thinking=thinking).tokens
        view["tokens"] = [{"id": row.token_id, "text": row.text, "loss": row.sampled} for row in rows]
    return view


def _text(view: dict[str, Any]) -> str:
    lines = [f"— {view['prompt_id']}"]
    lines += [f"{message['role']}: {message['content']}" for message in view["messages"]]
    for message in view["gold_turns"]:
        lines.append(f"{'gold' if message['role'] == 'assistant' else message['role']}: {message['content']}")
    if "tokens" in view:
        bearing = sum(token["loss"] for token in view["tokens"])
        lines.append(
            f"{len(view['tokens'])} tokens, {bearing} of them sampled by the policy, which bear loss ({LOSS}):"
        )
        for loss, run in groupby(view["tokens"], key=lambda token: token["loss"]):
            lines.append(f"  {LOSS if loss else NO_LOSS} {' '.join(repr(token['text']) for token in run)}")
    return "\n".join(lines)


def _verdict(facts: dict[str, Any]) -> str:
    played = f", {facts['episodes']} episodes played" if facts["episodes"] else ""
    head = f"{facts['task']}: {facts['checked']} gold replies checked{played}, {len(facts['faults'])} faults"
    if facts["without_gold"]:
        head += f", {facts['without_gold']} prompts have none"
    rows = [*facts["faults"], *(f"left out: {row}" for row in facts["excluded"])]
    return "\n".join([head, *rows[:SHOWN_ROWS]])

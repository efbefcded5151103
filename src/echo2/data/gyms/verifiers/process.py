"""The process that holds verifiers and one environment of it: many episodes side by side.

Invariant: every request ends with one Value, Played or Lost, whatever the environment does. The policy is reached
through the program alone: each episode has an endpoint of its own on the loopback interface, whose requests become Say.
What an environment blocks or breaks is this process, never the program's event loop.

    python -m echo2.data.gyms.verifiers.process     requests on standard input, answers on standard output
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from echo2.data.frames import Inbox, packed
from echo2.data.gyms.gym import GymError
from echo2.data.gyms.verifiers import endpoint
from echo2.data.gyms.verifiers.messages import (
    Ask,
    Count,
    Load,
    Lost,
    Open,
    Play,
    Played,
    Reply,
    Say,
    Stop,
    Told,
    Value,
    asks,
)
from echo2.data.task import Message

_READ_BYTES = 1 << 20
_NO_KEY = "ECHO2_NO_KEY"
"""A variable that is not set: no key of the user's is sent to our own endpoint."""


class Environment:
    """One environment of verifiers 0.4: its tasks, and episodes of them."""

    def __init__(self, ask: Open) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils import loaders

        from echo2.data.gyms.verifiers import harness

        sys.modules[harness.NAME] = harness
        self._vf, self._loaders = vf, loaders
        settings = dict(ask.settings)
        settings["taskset"] = {**settings.get("taskset", {}), **ask.args, "id": ask.environment}
        kind = loaders.env_config_type(ask.environment, settings.get("id", ""))
        roles = {name: field.default for name, field in kind.model_fields.items() if _is_role(field.default, vf)}
        own = loaders.default_harness_id(ask.environment) != "bash"
        for name, default in roles.items():
            role = dict(settings.get(name, {}))
            role.setdefault("runtime", {"type": "subprocess"})
            if "harness" not in role and default.harness is None and not own:
                role["harness"] = {"id": harness.NAME}
            settings[name] = role
        free = [name for name, default in roles.items() if not (settings[name].get("model") or default.model)]
        if len(free) != 1:
            raise ValueError(
                f"the policy must play one agent, of {', '.join(roles)} {len(free)} have no model of their own; give"
                f" the others one: settings = {{ {next(iter(roles))} = {{ model = …, client = {{ base_url = … }} }} }}"
            )
        (self._role,) = free
        self._config = loaders.resolve_env_config(settings)
        taskset = loaders.load_environment(self._config).taskset
        self._task_kind = type(taskset).task_type()
        self._data_kind = self._task_kind.data_type()
        runtime = getattr(self._config, self._role).runtime
        if self._task_kind.NEEDS_CONTAINER and runtime.type == "subprocess":
            raise ValueError(
                f"tasks of {ask.environment} need a container: settings = {{ {self._role} = {{ runtime = "
                f'{{ type = "docker" }} }} }}'
            )
        self._taskset = taskset
        self._stream: Iterator[Any] = iter(taskset)
        self._rows: list[dict[str, Any]] = []

    def count(self) -> int | None:
        if not self._taskset.bounded:
            return None
        self._rows += [self._row(task) for task in self._stream]
        return len(self._rows)

    def load(self, position: int) -> dict[str, Any]:
        missing = position + 1 - len(self._rows)
        self._rows += [self._row(task) for task in itertools.islice(self._stream, max(0, missing))]
        return self._rows[position]

    def _row(self, task: Any) -> dict[str, Any]:
        hidden = [name for name, field in type(task.data).model_fields.items() if field.exclude]
        if hidden:
            raise ValueError(f"a task's data must travel whole, {type(task.data).__name__} keeps back {hidden}")
        row: dict[str, Any] = task.data.model_dump(mode="json", exclude_none=True)
        return row

    async def play(self, ask: Play, say: endpoint.Sayer) -> Played:
        """Raises GymError where there is no judgement."""
        vf = self._vf
        task = self._task_kind(self._data_kind.model_validate(ask.data), self._config.taskset.task)
        # An environment of its own for each episode: what it serves from is entered and left by one asyncio task.
        environment = self._loaders.load_environment(self._config)
        async with endpoint.serve(say) as policy, environment.serving():
            client = vf.EvalClientConfig(base_url=policy.url, api_key_var=_NO_KEY)
            episode = await environment.run_episode(task, vf.ModelContext(model=endpoint.MODEL, client=client))
            if policy.fault is not None:
                raise policy.fault
        traces = [trace for trace in episode.traces if trace.agent.name == self._role]
        errors = [error for part in (episode, *traces) for error in part.errors]
        if not episode.ok or errors:
            told = "; ".join(f"{error.type}: {error.message}" for error in errors) or "the environment gave no reason"
            raise GymError(told)
        if len(traces) != 1:
            raise GymError(f"an episode must be one conversation of the policy, it was {len(traces)}")
        return _played(ask.number, traces[0])


def _is_role(default: Any, vf: Any) -> bool:
    return isinstance(default, vf.AgentConfig)


def _played(number: int, trace: Any) -> Played:
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored:
        raise GymError(f"every reward must be given, these were not: {', '.join(unscored)}")
    return Played(
        number,
        reward=float(trace.reward),
        rewards={name: float(reward.score) for name, reward in trace.rewards.items()},
        weights={name: float(reward.weight) for name, reward in trace.rewards.items()},
        metrics={name: float(value) for name, value in trace.metrics.items() if value is not None},
        stop=trace.stop_condition or "done",
        turns=trace.num_turns,
    )


class Desk:
    """Requests as they come, an asyncio task for each."""

    def __init__(self, told_fd: int) -> None:
        self._told_fd = told_fd
        self._environment: Environment | None = None
        self._episodes: dict[int, asyncio.Task[None]] = {}
        self._replies: dict[int, asyncio.Queue[str]] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Until the program closes its side; what is under way is then cancelled."""
        inbox = Inbox(asks)
        async with asyncio.TaskGroup() as group:
            while data := await reader.read(_READ_BYTES):
                for ask in inbox.feed(data):
                    if isinstance(ask, Play):
                        self._episodes[ask.number] = group.create_task(self._episode(ask))
                    else:
                        self._take(ask)
            for episode in self._episodes.values():
                episode.cancel()

    def _take(self, ask: Ask) -> None:
        if isinstance(ask, Reply):
            if ask.number in self._replies:
                self._replies[ask.number].put_nowait(ask.text)
        elif isinstance(ask, Stop):
            if ask.number in self._episodes:
                self._episodes[ask.number].cancel()
        else:
            try:
                self._tell(Value(ask.number, self._value(ask)))
            except Exception as error:
                self._tell(Lost(ask.number, _sentence(error)))

    def _value(self, ask: Ask) -> Any:
        if isinstance(ask, Open):
            self._environment = Environment(ask)
            return None
        assert self._environment is not None, "the first request opens it"
        if isinstance(ask, Count):
            return self._environment.count()
        assert isinstance(ask, Load), "the others are taken elsewhere"
        return self._environment.load(ask.position)

    async def _episode(self, ask: Play) -> None:
        replies = self._replies[ask.number] = asyncio.Queue()

        async def say(messages: list[Message]) -> str:
            self._tell(Say(ask.number, messages))
            return await replies.get()

        told: Told = Lost(ask.number, "it was stopped")
        try:
            assert self._environment is not None, "the first request opens it"
            told = await self._environment.play(ask, say)
        except Exception as error:
            told = Lost(ask.number, _sentence(error))
        finally:
            del self._replies[ask.number], self._episodes[ask.number]
            self._tell(told)

    def _tell(self, told: Told) -> None:
        try:
            view = packed(told)
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            view = packed(Lost(told.number, f"what it tells cannot be sent: {error}"))
        while view:
            view = view[os.write(self._told_fd, view) :]


def _sentence(error: Exception) -> str:
    kind = "" if isinstance(error, GymError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(error).split())}"[:1000]


async def _main(told_fd: int) -> None:
    reader = asyncio.StreamReader(limit=1 << 26)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    await Desk(told_fd).serve(reader)


def main() -> None:
    told_fd = os.dup(1)
    os.dup2(2, 1)  # what anything prints does not disturb the answers
    logging.basicConfig(level=logging.ERROR)
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        asyncio.run(_main(told_fd))
    except BrokenPipeError:
        return


if __name__ == "__main__":
    main()

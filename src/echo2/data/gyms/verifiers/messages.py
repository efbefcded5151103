"""What is asked of the process that holds verifiers, and what it answers; several requests are under way at once."""

from __future__ import annotations

from typing import Any

import msgspec

from echo2.data.task import Message


class Open(msgspec.Struct, frozen=True, tag="open"):
    """The environment of this process; the answer is a Value, or Lost for one that cannot be had."""

    number: int
    environment: str
    args: dict[str, Any]
    settings: dict[str, Any]


class Count(msgspec.Struct, frozen=True, tag="count"):
    """How many tasks the environment has: a number, or None for endless ones."""

    number: int


class Load(msgspec.Struct, frozen=True, tag="load"):
    """The data of the task at a position, as JSON."""

    number: int
    position: int


class Play(msgspec.Struct, frozen=True, tag="play"):
    number: int
    data: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """The policy's, to a Say of this episode."""

    number: int
    text: str


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Nobody waits for this episode any more."""

    number: int


Ask = Open | Count | Load | Play | Reply | Stop


class Value(msgspec.Struct, frozen=True, tag="value"):
    number: int
    value: Any


class Say(msgspec.Struct, frozen=True, tag="say"):
    """What happened since the policy's last turn; its reply is awaited."""

    number: int
    messages: list[Message]


class Played(msgspec.Struct, frozen=True, tag="played"):
    number: int
    reward: float
    """The sum of weighted rewards."""
    rewards: dict[str, float]
    weights: dict[str, float]
    metrics: dict[str, float]
    stop: str
    """What ended the episode, in the library's word."""
    turns: int


class Lost(msgspec.Struct, frozen=True, tag="lost"):
    """No value and no episode; why."""

    number: int
    reason: str


Told = Value | Say | Played | Lost

asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
tells: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)

"""What is asked of the process that holds reasoning-gym, and what it answers."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class Names(msgspec.Struct, frozen=True, tag="names"):
    """Which environments there are: a list of names."""


class Check(msgspec.Struct, frozen=True, tag="check"):
    """What is wrong with a configuration: a sentence, or None."""

    environment: str
    config: dict[str, Any]


class Make(msgspec.Struct, frozen=True, tag="make"):
    """A problem: ``question``, ``answer`` and ``metadata``, as ``plain.py`` writes them, and its ``number``."""

    environment: str
    config: dict[str, Any]
    seed: int
    held_out: bool
    index: int


class Judge(msgspec.Struct, frozen=True, tag="judge"):
    """The library's own score of an answer: a number."""

    environment: str
    config: dict[str, Any]
    problem: dict[str, Any]
    answer: str


Ask = Names | Check | Make | Judge


class Done(msgspec.Struct, frozen=True, tag="done"):
    value: Any


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The library raised."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The request passed a limit, or the process that had it went for a reason of its own (``lost``)."""

    cause: Literal["time", "memory", "lost"]


Told = Done | Failed | Ended

asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
tells: msgspec.msgpack.Decoder[Told] = msgspec.msgpack.Decoder(Told)

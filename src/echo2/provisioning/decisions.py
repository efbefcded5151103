"""What the controller decides, as values.

Invariant: every decision holds its reason in words with the numbers it rests on, and nothing else has to be known to
carry it out. ``event`` is what a line of ``events.jsonl`` says of it.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    """Order these machines."""

    offer: str
    machine_ids: tuple[str, ...]
    """New ones, given by the controller: an order that is repeated under the same id is the same order."""
    usd_per_h: float
    """Of each, as its seller asks; traffic is not in it."""
    priced_at_s: float
    """When that price was true."""
    start_by_s: float
    """A machine that has not joined by then is given up."""
    reason: str


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Let this machine finish what it has, and give it back."""

    machine_id: str
    offer: str
    reason: str


class Keep(msgspec.Struct, frozen=True, tag="keep"):
    """Change nothing."""

    reason: str


class End(msgspec.Struct, frozen=True, tag="end"):
    """End the run in order: no more machines, last publish, drain, give everything back."""

    reason: str


Decision = Activate | Release | Keep | End


def event(decision: Decision) -> tuple[str, dict[str, Any]]:
    """Kind and fields of its line, machines counted."""
    fields: dict[str, Any] = msgspec.to_builtins(decision)
    kind = fields.pop("type")
    if isinstance(decision, Activate):
        fields["machines"] = len(decision.machine_ids)
        fields["machine_ids"] = ",".join(decision.machine_ids)
    return f"provisioning_{kind}", fields

"""What must hold between the keys of a scenario, before anything is simulated.

Invariant: pure; a sentence for each relation that does not hold, with what was got and what to change. A key that the
rest of the scenario leaves unread is a fault: whoever wrote it expects something of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from echo2.config.root import Config
from echo2.config.sections import Section
from echo2.simulation.programs import COORDINATOR, LEARNER
from echo2.simulation.sections import EventSection, MachineSection, OfferSection, WorkersSection

_READ_BY = {
    "kill": {"for_s"},
    "preempt": set[str](),
    "slow": {"factor", "for_s"},
    "cut": {"for_s"},
    "price": {"usd_per_h"},
}
"""Keys of an event beside whom it befalls and when."""
_ONLY_SOME = {"factor", "for_s", "usd_per_h"}
_BEFALLS = {COORDINATOR: ("kill",), LEARNER: ("kill", "slow", "cut")}
_OF_TOKENS = ("places", "prefill_s", "median_tokens", "tail", "tail_spread")
_OF_GROUPS = ("group_s", "group_spread")
_SHORTEST_PERIOD_S = 0.01
"""What comes round more often would be most of the simulation."""
_NUMBERS = 200
"""Machines of an offer are numbered; a pattern that matches none of so many matches none."""

Machines = Sequence[MachineSection]


def broken_relations(
    config: Config, workers: Sequence[WorkersSection], offers: Sequence[OfferSection], events: Sequence[EventSection]
) -> list[str]:
    machines = (*workers, *offers)
    return [
        *_somebody(machines),
        *_periods(config),
        *_paces(config, machines),
        *_kinds(machines),
        *_offers(config, offers),
        *_arrivals(workers),
        *(fault for index, event in enumerate(events) for fault in _event(f"events.{index}", event)),
        *(fault for index, event in enumerate(events) for fault in _befallen(index, event, workers, offers)),
    ]


def _somebody(machines: Machines) -> Iterator[str]:
    if not machines:
        yield "a scenario must have somebody to generate: add [[workers]], or [[offers]] to rent from"
    for name, count in Counter(kind.name for kind in machines).items():
        if count > 1:
            yield f'names of [[workers]] and [[offers]] must differ, got "{name}" {count} times'


def _periods(config: Config) -> Iterator[str]:
    for key, value in (
        ("coordinator.heartbeat_s", config.coordinator.heartbeat_s),
        ("provisioning.period_s", config.provisioning.period_s),
    ):
        if value < _SHORTEST_PERIOD_S:
            yield f"{key} must be at least {_SHORTEST_PERIOD_S} in a scenario, got {value:g}"


def _paces(config: Config, machines: Machines) -> Iterator[str]:
    if config.rehearsal.train_s <= 0:
        yield "rehearsal.train_s must be more than 0: it is T_train, the time of a training step"
    for kind in machines:
        if not kind.tokens_per_s and not (config.rehearsal.group_s if kind.group_s is None else kind.group_s):
            yield f"machines of {kind.name} must take time: give group_s, tokens_per_s or rehearsal.group_s"


def _kinds(machines: Machines) -> Iterator[str]:
    for kind in machines:
        unread = _given(kind).intersection(_OF_GROUPS if kind.tokens_per_s else _OF_TOKENS)
        if unread:
            names = ", ".join(sorted(unread))
            why = "works out a group's time from tokens_per_s" if kind.tokens_per_s else "has no tokens_per_s"
            yield f"{kind.name} {why}, so nothing reads its {names}: remove one or the other"


def _offers(config: Config, offers: Sequence[OfferSection]) -> Iterator[str]:
    for kind in offers:
        if not kind.usd_per_h:
            yield f"usd_per_h of the offer {kind.name} must be more than 0: its price is what it is chosen by"
    if offers and config.run.mode != "echo2":
        yield (
            f'[[offers]] need run.mode = "echo2", because capacity is planned by its overlap: got "{config.run.mode}"; '
            "make them [[workers]], or set run.mode"
        )


def _arrivals(workers: Sequence[WorkersSection]) -> Iterator[str]:
    for kind in workers:
        if kind.arrives_every_s and kind.count == 1:
            yield f"{kind.name} is one worker, so nothing reads its arrives_every_s: set count, or give arrives_s"


def _event(name: str, event: EventSection) -> Iterator[str]:
    if (event.at_s is None) == (event.at_step is None):
        got = "neither" if event.at_s is None else "both"
        yield f"{name} must have one of at_s and at_step, got {got}"
    unread = (_given(event) & _ONLY_SOME) - _READ_BY[event.what]
    if unread:
        yield f'{name} must not have {", ".join(sorted(unread))}: what = "{event.what}" does not read it'
    if event.what == "price" and not event.usd_per_h:
        yield f"{name} must have a usd_per_h above 0: it is a new price"
    if event.what == "cut" and not event.for_s:
        yield f"{name} must have a for_s above 0: the time for which a line is down"


def _befallen(
    index: int, event: EventSection, workers: Sequence[WorkersSection], offers: Sequence[OfferSection]
) -> Iterator[str]:
    name = f"events.{index}"
    if event.who in _BEFALLS:
        if event.what not in _BEFALLS[event.who]:
            may = " or ".join(f'"{what}"' for what in _BEFALLS[event.who])
            yield f'{name}.what must be {may} where it befalls the {event.who}, got "{event.what}"'
        return
    if event.what == "price":
        if not any(fnmatchcase(offer.name, event.who) for offer in offers):
            yield f'{name}.who must match an offer, got "{event.who}"; {_there_are([offer.name for offer in offers])}'
        return
    names = [f"{kind.name}-{number}" for kind in workers for number in range(1, kind.count + 1)]
    names += [f"{kind.name}-{number}" for kind in offers for number in range(1, _NUMBERS + 1)]
    if (workers or offers) and not any(fnmatchcase(one, event.who) for one in names):
        kinds = [f"{kind.name}-1" for kind in (*workers, *offers)]
        yield f'{name}.who must match "learner", "coordinator" or a worker, got "{event.who}"; {_there_are(kinds)} …'


def _given(section: Section) -> set[str]:
    """Keys that differ from their defaults."""
    fields = type(section).model_fields
    return {key for key in section.model_fields_set if getattr(section, key) != fields[key].default}


def _there_are(names: Sequence[str]) -> str:
    return f"there are {', '.join(names)}" if names else "there are none"

from __future__ import annotations

import pytest

from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay import links as ln
from echo2.broadcast.relay.redial import Redial


def test_i9_who_does_not_read_what_it_is_told_is_hung_up_on_before_it_costs_memory_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ln, "MOST_UNSENT_BYTES", 1000)
    links = ln.Links("x", None, Redial(1, 0.0))
    deaf, listening = links.up(1, "a", False, 0, 0.0), links.up(2, "b", False, 0, 0.0)
    for stream in range(100):
        for link in (deaf, listening):
            links.say(link, f.Refuse(stream, "no"))
        assert listening.next_out(lambda: False, 0.0)
    assert {action.link for action in links.take() if isinstance(action, ln.Hangup)} == {deaf.number}

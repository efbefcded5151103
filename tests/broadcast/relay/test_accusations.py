from __future__ import annotations

from echo2.broadcast.relay.accusations import TOLD_S, Accusations


def test_an_accusation_is_told_for_a_while_and_can_be_made_again() -> None:
    accusations = Accusations()
    accusations.add("a", 0.0)
    accusations.add("a", 1.0)
    assert accusations.peers(TOLD_S - 0.1) == ["a"]
    assert accusations.peers(TOLD_S) == []
    accusations.add("a", TOLD_S + 50.0)
    assert accusations.peers(TOLD_S + 60.0) == ["a"]


def test_the_newest_are_told_first_and_unfair_ones_are_withdrawn() -> None:
    accusations = Accusations()
    for now, peer in enumerate("abc"):
        accusations.add(peer, float(now))
    accusations.withdraw("b")
    accusations.withdraw("stranger")
    assert accusations.peers(5.0) == ["c", "a"]

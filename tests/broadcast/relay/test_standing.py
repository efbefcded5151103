from __future__ import annotations

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.links import Dial, Hangup, Link, Links, PaddingOut
from echo2.broadcast.relay.redial import Redial
from echo2.broadcast.relay.standing import MOST_WARMING_S, STANDBY_WARM_BYTES, WARM_BYTES, Standing

A, B, C = (f.Source(name, f"{name}.test", 1) for name in "abc")
THE_SEED = f.Source(SEED, "seed.test", 1)


def plan(generation: int, *sources: f.Source) -> f.Assign:
    return f.Assign(generation, b"", (f.Feed(sources, (), 0.0, True),), (), 0)


class Child:
    def __init__(self) -> None:
        self.links = Links("x", THE_SEED, Redial(1, 0.0))
        self.standing = Standing(self.links, 1)
        self._numbers = 0
        self.now = 10.0

    def take(self, assign: f.Assign, busy: tuple[str, ...] = ()) -> list[str]:
        """Returns who is dialled and, with a minus, who is hung up on."""
        self.now += MOST_WARMING_S  # whatever was being warmed is
        self.standing.take(assign, busy, self.now)
        names = {link.number: link.peer for link in self.links}
        news = []
        for action in self.links.take():
            if isinstance(action, Dial):
                news.append(action.source.node_id)
            elif isinstance(action, Hangup):
                news.append("-" + names[action.link])
        return news

    def up(self, peer: str) -> Link:
        self._numbers += 1
        self.now += MOST_WARMING_S
        link = self.links.up(self._numbers, peer, True, 0, self.now)
        self.standing.warm(link, self.now)
        return link


def asked(link: Link) -> list[int]:
    """Bytes of padding that were asked for."""
    sizes = []
    while (out := link.next_out(lambda: False, 10.0)) is not None:
        assert not isinstance(out, PaddingOut) and isinstance(out, bytes)
        frame = f.decode_control(out[f.HEADER.size :])
        sizes += [frame.nbytes] if isinstance(frame, f.Warm) else []
    return sizes


def test_parent_and_grandparent_stay_connected_and_nobody_else_but_the_seed_and_who_feeds_us() -> None:
    child = Child()
    assert child.take(plan(1, A, B, C, THE_SEED)) == ["a", "b"]
    for peer in (SEED, "a", "b", "c"):
        child.up(peer)
    assert child.take(plan(2, B, THE_SEED), busy=("c",)) == ["-a"]
    assert child.take(plan(1, A, B, C, THE_SEED)) == [], "an older plan comes late"


def test_the_parents_link_is_warmed_long_enough_to_be_measured_and_the_grandparents_enough_to_start_fast() -> None:
    child = Child()
    child.take(plan(1, A, B, C, THE_SEED))
    assert asked(child.up("a")) == asked(child.up(SEED)) == [WARM_BYTES]
    assert asked(child.up("b")) == [STANDBY_WARM_BYTES]
    assert asked(child.up("c")) == [], "it may feed us some day, but is not kept"


def test_a_link_is_warmed_once_and_again_when_it_comes_to_be_measured() -> None:
    child = Child()
    child.take(plan(1, A, B, THE_SEED))
    b = child.up("b")
    assert asked(b) == [STANDBY_WARM_BYTES]
    child.take(plan(2, A, B, C, THE_SEED))
    assert asked(b) == []
    child.take(plan(3, B, THE_SEED))
    assert asked(b) == [WARM_BYTES]
    child.take(plan(4, A, B, THE_SEED))
    child.take(plan(5, B, THE_SEED))
    assert asked(b) == []


def test_a_seed_that_started_again_is_listened_to_from_its_first_plan_on() -> None:
    child = Child()
    child.take(plan(7, A, THE_SEED))
    child.standing.forget()
    assert child.take(plan(1, B, THE_SEED)) == ["b"]


def test_links_are_warmed_one_at_a_time_because_two_would_share_our_line() -> None:
    child = Child()
    child.take(plan(1, A, B, THE_SEED))
    links = [child.links.up(number, peer, True, 0, 0.0) for number, peer in enumerate((SEED, "a", "b"), start=20)]
    for link in links:
        child.standing.warm(link, 0.0)
    assert [asked(link) for link in links] == [[WARM_BYTES], [], []]
    child.standing.tick(MOST_WARMING_S - 0.1)
    assert [asked(link) for link in links] == [[], [], []]
    links[0].received(WARM_BYTES, 1.0, 2.0)
    child.standing.tick(2.0)
    assert [asked(link) for link in links] == [[], [WARM_BYTES], []], "the first has all that it asked for"
    child.links.down(21)
    child.standing.tick(2.1)
    assert [asked(link) for link in links] == [[], [], [STANDBY_WARM_BYTES]], "nobody waits for a link that is gone"


def test_a_connection_of_the_plan_that_was_lost_is_made_again_unless_the_peer_cannot_be_dialled() -> None:
    child = Child()
    child.take(plan(1, A, B, THE_SEED))
    a = child.up("a")
    child.links.undial("b", 0)
    child.links.down(a.number)
    child.standing.keep(["b"])
    assert [action.source.node_id for action in child.links.take() if isinstance(action, Dial)] == ["a"]

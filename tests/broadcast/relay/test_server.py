from __future__ import annotations

import pytest
from virtual_relays import object_manifest

from echo2.broadcast.plan.model import SEED, Stretch
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.frames import MAX_STREAMS
from echo2.broadcast.relay.links import Hangup, Links
from echo2.broadcast.relay.node import Node
from echo2.errors import Malformed

MANIFEST = object_manifest(20)


def want(stream: int, root: str = "f" * 64) -> f.Want:
    return f.Want(stream, root, (Stretch(0, 5),), True, b"")


def seed(*peers: str, published: bool = False) -> Node:
    """With link 1 to the first peer, link 2 to the second and so on."""
    node = Node(SEED, None)
    if published:
        node.publish(MANIFEST, 0.0)
    for number, peer in enumerate(peers, start=1):
        node.link_up(number, peer, False, 0, 0.0)
    return node


@pytest.mark.parametrize("published", [False, True])
def test_i9_a_peer_has_so_many_streams_on_all_its_connections_and_not_one_more(published: bool) -> None:
    node = seed("a", "a", "b", published=published)
    root = MANIFEST.object_root if published else "f" * 64
    for stream in range(MAX_STREAMS):
        node.control(1 + stream % 2, want(stream, root), 0.0)
    for link in (1, 2):
        with pytest.raises(Malformed, match=f"at most {MAX_STREAMS} streams"):
            node.control(link, want(MAX_STREAMS, root), 0.0)
    node.control(3, want(MAX_STREAMS, root), 0.0)
    node.control(1, f.Halt(0), 0.0)
    node.control(2, want(MAX_STREAMS, root), 0.0)


def test_a_stream_that_several_connections_carry_counts_once() -> None:
    node = seed("a", "a")
    for stream in range(MAX_STREAMS):
        node.control(1, want(stream), 0.0)
        node.control(2, want(stream), 0.0)


@pytest.mark.parametrize("published", [False, True])
def test_i9_a_stream_that_is_asked_for_again_on_the_same_link_costs_no_second_place(published: bool) -> None:
    node = seed("a", published=published)
    frame = want(1, MANIFEST.object_root)
    node.control(1, frame, 0.0)
    with pytest.raises(Malformed, match="stream 1 is on it"):
        node.control(1, frame, 0.0)


def test_publishing_does_not_look_at_every_link_for_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    node, looks = seed(*(f"w{k}" for k in range(50))), [0]
    real = Links.__iter__

    def counted(links: Links) -> object:
        looks[0] += 1
        return real(links)

    monkeypatch.setattr(Links, "__iter__", counted)
    node.publish(object_manifest(1000), 0.0)
    assert looks[0] < 5


def test_chunks_that_were_published_after_they_were_asked_for_are_sent() -> None:
    node = seed("a")
    node.control(1, want(1, MANIFEST.object_root), 0.0)
    node.publish(MANIFEST, 0.1)
    node.tick({}, 0.2)
    out = node.next_out(1, 0.3)
    while isinstance(out, bytes):
        out = node.next_out(1, 0.3)
    assert getattr(out, "number", None) == 0


def test_what_was_withdrawn_is_refused_and_nobody_is_hung_up_on() -> None:
    node = seed("a", published=True)
    node.control(1, want(1, MANIFEST.object_root), 0.0)
    node.withdraw(MANIFEST.object_root)
    frames = []
    while isinstance(out := node.next_out(1, 0.0), bytes):
        frames.append(f.decode_control(out[f.HEADER.size :]))
    assert frames == [f.Refuse(1, "the object was withdrawn")]
    assert out is None
    assert not any(isinstance(action, Hangup) for action in node.take())

"""The parent's side of a relay: who is sent what.

Invariant: a node serves only who may ask it, and at most one more than its assignment has children, the seed two more;
orphans may take the places of children that have not come. So the learner's uplink carries a bounded number of copies
whatever the number of workers (field report H09). Pure.
"""

from __future__ import annotations

from echo2.broadcast.relay.frames import MAX_STREAMS, Have, Refuse, Want
from echo2.broadcast.relay.intake import Intake
from echo2.broadcast.relay.links import Link, Links
from echo2.broadcast.relay.receiver import Receiver
from echo2.broadcast.relay.serving import Serving, order_of, unpack_flags
from echo2.errors import Malformed

ASSIGNMENT_GRACE_S = 2.0
"""A child may know its parent before the parent knows the child."""
ORPHANS = 1
"""Children a node serves beyond those of the plan."""
SEED_ORPHANS = 2


class Server:
    def __init__(self, links: Links, receiver: Receiver, is_seed: bool) -> None:
        self._links = links
        self._receiver = receiver
        self._is_seed = is_seed

    def want(self, link: Link, want: Want, now: float) -> None:
        """Raises Malformed for more streams than a peer may have, and for one that the link has already."""
        if want.stream in link.streams():
            raise Malformed(f"a link has a stream once, and stream {want.stream} is on it")
        streams = set[int]().union(*(x.streams() for x in self._links if x.peer == link.peer))
        if len(streams - {want.stream}) >= MAX_STREAMS:
            raise Malformed(f"a peer has at most {MAX_STREAMS} streams")
        link.pending.append((want, now))
        self.consider(link, now)

    def consider(self, link: Link, now: float) -> None:
        """Serve, keep or refuse what the child at the other end asked for."""
        waiting, link.pending = link.pending, []
        for want, since_s in waiting:
            intake = self._receiver.get(want.root)
            if intake is not None and self._may_serve(intake, link.peer):
                try:
                    self._serve(link, intake, want)
                except Malformed as error:
                    self._links.hang_up(link, str(error))
            elif now - since_s > ASSIGNMENT_GRACE_S:
                self.refuse(link, want.stream, "it is not in my part of the plan, or I serve enough others")
            else:
                link.pending.append((want, since_s))

    def have(self, link: Link, have: Have) -> None:
        if have.stream in link.servings:
            link.servings[have.stream].child_got(have.numbers)

    def halt(self, link: Link, stream: int) -> None:
        if link.servings.pop(stream, None) is not None:
            self._links.pace(link)
        link.pending = [(want, since_s) for want, since_s in link.pending if want.stream != stream]

    def stored(self, root: str, chunk: int) -> None:
        """The chunk is verified and stored: children may have it."""
        for link in self._links:
            for serving in link.servings.values():
                if serving.root == root and serving.arrived(chunk):
                    self._links.wake(link)

    def opened(self, intake: Intake) -> None:
        """Chunks of an earlier life came to light."""
        numbers = [number for number, here in enumerate(intake.here) if here]
        for link in self._links:
            for serving in link.servings.values():
                if serving.root == intake.root:
                    for number in numbers:
                        serving.arrived(number)
                    self._links.wake(link)

    def look_for_withdrawn(self) -> None:
        """What is not here any more is not served."""
        for link in self._links:
            for stream, serving in list(link.servings.items()):
                if self._receiver.get(serving.root) is None:
                    self.refuse(link, stream, "the object was withdrawn")

    def is_sending(self) -> bool:
        return any(serving.backlog for link in self._links for serving in link.servings.values())

    def _may_serve(self, intake: Intake, peer: str) -> bool:
        others = {x.peer for x in self._links for s in x.servings.values() if s.root == intake.root} - {peer}
        spare = SEED_ORPHANS if self._is_seed else ORPHANS
        return (self._is_seed or peer in intake.children) and len(others) < intake.planned_children + spare

    def _serve(self, link: Link, intake: Intake, want: Want) -> None:
        serving = self._carried_elsewhere(link.peer, want.stream)
        if serving is None:
            order = order_of(want.stretches, want.spills, intake.count)
            child_has = unpack_flags(want.have, intake.count)
            policy, pace = intake.manifest.policy, want.pace_bytes_per_s
            serving = Serving(intake.root, policy, want.stream, order, child_has, intake.here, pace)
        link.servings[want.stream] = serving
        self._links.pace(link)
        self._links.wake(link)

    def _carried_elsewhere(self, peer: str, stream: int) -> Serving | None:
        """The stream, when another connection of the same child carries it already: they share its chunks."""
        for link in self._links:
            if link.peer == peer and not link.outbound and stream in link.servings:
                return link.servings[stream]
        return None

    def refuse(self, link: Link, stream: int, why: str) -> None:
        self.halt(link, stream)
        self._links.say(link, Refuse(stream, why))

"""Relays that fail, lie or are attacked, on loopback: nobody waits for ever, no wrong byte is stored or passed on."""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest
from raw_peer import RawParent, RawPeer
from relays import Published, RunKeys
from swarm import FixedDirector, MakeShell, RelayHere, Swarm, is_chunk, paced, until

from echo2.broadcast.plan.model import SEED
from echo2.broadcast.relay import control as c
from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.shell import RelayShell
from echo2.broadcast.signing import generate_key

pytestmark = pytest.mark.integration

KIB, MIB = 1024, 1024 * 1024
PACE = 4.0 * MIB
"""Bytes per second that the seed sends to each child."""
SLOW = 1.0 * MIB
"""Where something must happen in the middle: relays tell of their progress twice a second."""
CHAIN = {"w1": SEED, "w2": "w1", "w3": "w2"}


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys(tmp_path)


def chain(keys: RunKeys, parents: dict[str, str] = CHAIN, seed: MakeShell | None = None, pace: float = PACE) -> Swarm:
    return Swarm(keys, FixedDirector(parents, pace), seed or paced(pace))


def one_mib(keys: RunKeys, version: int = 1) -> Published:
    return keys.publish(version, MIB, 32 * KIB)


def await_all(published: Published, *nodes: RelayHere) -> None:
    until(lambda: all(node.has(published) for node in nodes), "the object to be everywhere")


def accused_by(swarm: Swarm, node_id: str) -> tuple[str, ...]:
    report = swarm.director.reports.get(node_id)
    return report.accused if report is not None else ()


def test_a_chain_brings_the_object_to_everybody_and_the_seed_sends_it_once(keys: RunKeys) -> None:
    with chain(keys) as swarm:
        nodes = [swarm.here(name) for name in CHAIN]
        published = one_mib(keys)
        swarm.publish(published, after=3)
        await_all(published, *nodes)
        until(lambda: swarm.seed.tally().sent_bytes == published.manifest.object_size, "the seed's count")
        assert [node.tally().reparentings for node in nodes] == [0, 0, 0]


# ---- parents that fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["kill", "freeze"])
def test_h07_orphans_of_a_dead_or_frozen_relay_find_another_parent(keys: RunKeys, fault: str) -> None:
    with chain(keys, pace=SLOW) as swarm:
        middle = swarm.there("w1")
        orphan, last = swarm.here("w2"), swarm.here("w3")
        published = one_mib(keys)
        swarm.publish(published, after=3)
        until(lambda: orphan.share(published) > 0.2, "a part of the object")
        middle.kill() if fault == "kill" else middle.freeze()
        await_all(published, orphan, last)
        assert orphan.events("relay_reparented")[0]["now"] == SEED
        assert not last.events("relay_reparented"), "its parent lives"


def test_a_relay_ten_times_too_slow_is_left(keys: RunKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.intake.STARVED_S", 1.0)
    with chain(keys, {"w1": SEED, "w2": "w1"}) as swarm:
        slow, child = swarm.here("w1", paced(PACE / 10)), swarm.here("w2")
        published = keys.publish(1, 2 * MIB, 32 * KIB)
        swarm.publish(published, after=2)
        await_all(published, child, slow)
        assert child.events("relay_reparented")[0]["why"] == "it has chunks and sends too few for 1 s"
        until(lambda: accused_by(swarm, "w2") == ("w1",), "the accusation")


class Corrupting(RelayShell):
    """Changes the last byte of every third chunk that it passes on."""

    def next_frame(self, number: int, buffer: bytearray) -> memoryview | bytes:
        frame = super().next_frame(number, buffer)
        if is_chunk(frame) and f.HEADER.unpack(frame[: f.HEADER.size])[5] % 3 == 2:
            return bytes(frame[:-1]) + bytes([frame[-1] ^ 1])
        return frame


def test_e09_a_corrupted_chunk_is_neither_kept_nor_passed_on_and_its_sender_is_left_and_told_on(keys: RunKeys) -> None:
    with chain(keys) as swarm:
        corrupting, child, last = swarm.here("w1", Corrupting), swarm.here("w2"), swarm.here("w3")
        published = one_mib(keys)
        swarm.publish(published, after=3)
        await_all(published, corrupting, child, last)
        assert [event["peer"] for event in child.events("relay_wrong_chunk")] == ["w1"]
        assert not last.events("relay_wrong_chunk"), "nothing wrong was passed on"
        until(lambda: accused_by(swarm, "w2") == ("w1",), "the accusation")


def test_i7_when_the_seed_itself_corrupts_the_program_is_told_that_the_object_is_stuck(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.receiver.STUCK_S", 1.0)
    monkeypatch.setattr("echo2.broadcast.relay.intake.ROUND_PAUSE_S", 0.05)
    with chain(keys, {"w1": SEED}, Corrupting) as swarm:
        node = swarm.here("w1")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        node.order(c.Bring(published.signed))
        until(lambda: node.said(c.Stuck), "the word that it is stuck")
        stuck = node.said(c.Stuck)[0]
        data = Path(stuck.path).read_bytes()
        for number, digest in enumerate(published.manifest.chunks):
            chunk = data[number * 32 * KIB : (number + 1) * 32 * KIB]
            assert chunk == published.content[number * 32 * KIB : (number + 1) * 32 * KIB] or not any(chunk), digest
        # The program repairs the file by other means and asks again.
        Path(stuck.path).write_bytes(published.content)
        node.order(c.Bring(published.signed))
        await_all(published, node)


@pytest.mark.parametrize("claims", [0, 10_000])
def test_i7_a_parent_that_beats_but_sends_nothing_is_left(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch, claims: int
) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.intake.SILENT_S", 1.0 if claims == 0 else 1000.0)
    monkeypatch.setattr("echo2.broadcast.relay.intake.STARVED_S", 1.0)
    with chain(keys, {"liar": SEED, "w2": "liar"}) as swarm, RawParent(keys, "liar", claims) as liar:
        swarm.director.node_joined("liar", "127.0.0.1", liar.port, 0.0)
        child = swarm.here("w2")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        await_all(published, child)
        assert liar.wanted
        if claims:
            until(lambda: accused_by(swarm, "w2") == ("liar",), "the accusation")


class Cutting(RelayShell):
    """Hangs up after every chunk that it sent."""

    def next_frame(self, number: int, buffer: bytearray) -> memoryview | bytes:
        wire = self._wires.get(number)
        assert wire is not None, "it asks for a frame"
        if getattr(wire, "is_over", False):
            wire.hang_up("cut at a chunk's boundary")
            return b""
        frame = super().next_frame(number, buffer)
        wire.is_over = is_chunk(frame)  # type: ignore[attr-defined]
        return frame


def test_i7_connections_cut_after_every_chunk_bring_the_object_nevertheless(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.intake.ROUND_PAUSE_S", 0.05)
    with chain(keys, {"w1": SEED, "w2": "w1"}, Cutting) as swarm:
        nodes = [swarm.here("w1", Cutting), swarm.here("w2")]
        published = keys.publish(1, 10 * 32 * KIB - 500, 32 * KIB)
        swarm.publish(published, after=2)
        await_all(published, *nodes)
        sent = swarm.seed.tally().sent_bytes + nodes[0].tally().sent_bytes
        assert sent < 3.5 * published.manifest.object_size, "what was here was not sent again"


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_relay_that_starts_again_keeps_the_chunks_that_it_had(keys: RunKeys) -> None:
    with chain(keys, {"w1": SEED}, pace=SLOW) as swarm:
        first = swarm.here("w1")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        until(lambda: first.share(published) > 0.4, "a part of the object")
        first.close()
        had = first.shell._node.report().received_bytes
        again = swarm.here("w1")
        await_all(published, again)
        assert again.shell._node.report().received_bytes == published.manifest.object_size - had


def on_full_disk(monkeypatch: pytest.MonkeyPatch, module: str, name: str, folder: Path, room: int) -> None:
    """Let the module's function ``name`` find no space in ``folder`` after ``room`` calls."""
    real: Callable[..., object] = getattr(importlib.import_module(module), name)
    left = [room]

    def limited(descriptor: int, *arguments: object) -> object:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(folder)):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, *arguments)

    monkeypatch.setattr(f"{module}.{name}", limited)


@pytest.mark.parametrize(
    ("module", "name", "room"), [("echo2.broadcast.relay.chunks", "allocate", 0), ("os", "pwrite", 8)]
)
def test_e05_a_full_disk_is_one_nodes_trouble_and_a_sentence(
    keys: RunKeys, monkeypatch: pytest.MonkeyPatch, module: str, name: str, room: int
) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.server.ASSIGNMENT_GRACE_S", 0.5)
    with chain(keys) as swarm:
        full, child, last = (swarm.here(node) for node in CHAIN)
        published = one_mib(keys)
        with monkeypatch.context() as patch:
            on_full_disk(patch, module, name, full.folder, room)
            full.order(c.Bring(published.signed))
            swarm.publish(published, after=3)
            until(lambda: full.said(c.Stuck), "the sentence")
            await_all(published, child, last)
        assert "disk is full; free space there" in full.said(c.Stuck)[0].why
        assert not list(full.folder.iterdir()), "the disk wants its bytes back"
        full.order(c.Bring(published.signed))
        swarm.director.inject("w1", swarm.director.assignment("w1", published.signed))
        await_all(published, full)


def test_an_object_that_was_cut_short_under_the_seed_is_given_up_and_the_next_one_is_not(keys: RunKeys) -> None:
    with chain(keys, {"w1": SEED}) as swarm:
        node = swarm.here("w1")
        broken, whole = one_mib(keys, 1), one_mib(keys, 2)
        swarm.publish(broken, after=1)
        os.truncate(broken.path, 40 * KIB)
        until(lambda: swarm.seed.events("relay_file_failed"), "the event")
        assert "was cut short" in swarm.seed.events("relay_file_failed")[0]["why"]
        swarm.publish(whole)
        await_all(whole, node)
        assert not node.said(c.Whole)[1:]


# ---- versions and joiners --------------------------------------------------------------------------------------------


def test_a_newer_version_waits_its_turn_and_both_arrive(keys: RunKeys) -> None:
    with chain(keys, pace=SLOW) as swarm:
        nodes = [swarm.here(name) for name in CHAIN]
        older, newer = one_mib(keys, 1), one_mib(keys, 2)
        swarm.publish(older, after=3)
        until(lambda: nodes[2].share(older) > 0.2, "a part of the older version")
        swarm.publish(newer)
        await_all(older, *nodes)
        await_all(newer, *nodes)
        for node in nodes:
            assert [whole.root for whole in node.said(c.Whole)] == [older.root, newer.root]


def test_a_node_that_joins_in_the_middle_gets_everything(keys: RunKeys) -> None:
    with chain(keys, {"w1": SEED, "w2": "w1"}, pace=SLOW) as swarm:
        first = swarm.here("w1")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        until(lambda: first.share(published) > 0.4, "a part of the object")
        joiner = swarm.here("w2")
        await_all(published, first, joiner)
        assert joiner.tally().reparentings == 0


# ---- strangers and forgers -------------------------------------------------------------------------------------------


def test_a_node_that_was_expelled_gets_nothing_more_and_holds_nobody_up(keys: RunKeys) -> None:
    with chain(keys, {"w1": SEED, "w2": SEED}) as swarm:
        outcast, other = swarm.here("w1"), swarm.here("w2")
        first, second = one_mib(keys), one_mib(keys, 2)
        swarm.publish(first, after=2)
        await_all(first, outcast, other)
        swarm.seed.order(c.Expel("w1"))
        swarm.publish(second)
        await_all(second, other)
        assert outcast.share(second) == 0.0
        assert not outcast.has(second)


def test_strangers_without_the_runs_certificate_are_turned_away_and_hold_nobody_up(
    keys: RunKeys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.sockets.GREETING_S", 1.0)
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
    with chain(keys, {"w1": SEED}) as swarm, contextlib.ExitStack() as opened:
        address = ("127.0.0.1", swarm.seed.port)
        with contextlib.suppress(OSError), RawPeer(RunKeys(tmp_path / "other"), "w1", swarm.seed.port) as other:
            assert other.is_hung_up()
        uncertified = opened.enter_context(bare.wrap_socket(socket.create_connection(address)))
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"):
            uncertified.recv(1)
        for _ in range(80):  # and these say nothing
            opened.enter_context(socket.create_connection(address))
        node = swarm.here("w1")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        await_all(published, node)
        assert swarm.seed.events("relay_stranger")
        assert set(swarm.director.where) == {"w1"}


def test_a_certified_node_that_stands_where_another_should_is_not_asked(keys: RunKeys) -> None:
    with chain(keys, {"w1": SEED, "w2": "w1"}) as swarm, RawParent(keys, "impostor", 100) as impostor:
        swarm.director.node_joined("w1", "127.0.0.1", impostor.port, 0.0)
        child = swarm.here("w2")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        await_all(published, child)
        assert "must be relay w1, it is impostor" in child.events("relay_reparented")[0]["why"]
        assert impostor.wanted == 0


@pytest.mark.parametrize(("host", "port"), [("a..b", 1), ("x" * 300, 1), ("127.0.0.1", 70_000), ("127.0.0.1", 1)])
def test_a_parent_without_an_address_is_left(keys: RunKeys, host: str, port: int) -> None:
    with chain(keys, {"w1": SEED, "w2": "w1"}) as swarm:
        swarm.director.node_joined("w1", host, port, 0.0)
        child = swarm.here("w2")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        await_all(published, child)
        assert child.events("relay_reparented")[0]["why"].startswith("it cannot be reached")


def forged(keys: RunKeys, published: Published, how: str) -> bytes:
    manifest = published.manifest
    match how:
        case "another's key":
            return keys.sign(manifest, generate_key())
        case "another run":
            return keys.sign(msgspec.structs.replace(manifest, run_id="other"))
        case "2**63 bytes":
            return keys.sign(msgspec.structs.replace(manifest, object_size=2**63))
        case "chunks of 2**63 bytes":
            return keys.sign(msgspec.structs.replace(manifest, chunk_size=2**63))
        case "a path for a root":
            return keys.sign(msgspec.structs.replace(manifest, object_root="../" * 20 + "etc"))
    raise AssertionError(how)


def test_i6_i9_a_forged_manifest_makes_no_file_and_harms_nothing(keys: RunKeys) -> None:
    ways = ("another's key", "another run", "2**63 bytes", "chunks of 2**63 bytes", "a path for a root")
    with chain(keys, {"w1": SEED}) as swarm:
        node = swarm.here("w1")
        published, other = one_mib(keys), one_mib(keys, 2)
        until(lambda: swarm.director.reachable, "the node")
        for how in ways:
            swarm.director.inject("w1", swarm.director.assignment("w1", forged(keys, other, how)))
        swarm.publish(published)
        await_all(published, node)
        assert len(node.events("relay_bad_manifest")) == len(ways)
        assert [path.name for path in node.folder.iterdir()] == [published.root]


HUGE = 2**32 - 1
HOSTILE: dict[str, bytes] = {
    **{f"4 GiB of type {kind}": f.HEADER.pack(kind, 0, 0, HUGE, 0, 0) for kind in (0, 1, 2, 3, 255)},
    "an empty control frame": f.HEADER.pack(f.CONTROL, 0, 0, 0, 0, 0) * 3 + f.HEADER.pack(9, 0, 0, 1, 0, 0),
    "a control frame of junk": f.HEADER.pack(f.CONTROL, 0, 0, 4, 0, 0) + b"\xc1\xff\x00\x01",
    "deep nesting": f.HEADER.pack(f.CONTROL, 0, 0, 100_000, 0, 0) + b"\x91" * 100_000,
    "an assignment by a node": f.encode_control(f.Assign(9, b"", (), (), 0)),
    "a second greeting": f.encode_control(f.Greet(1, "run", 0)),
    "a refusal of nothing": f.encode_control(f.Refuse(1, "no")),
    "a warm-up of 2**63 bytes": f.encode_control(f.Warm(2**63)),
    "too many streams": b"".join(f.encode_control(f.Want(n, "f" * 64, (), True, b"")) for n in range(65)),
}  # fmt: skip


def test_i9_hostile_frames_cost_their_sender_the_link_and_nobody_else_anything(keys: RunKeys) -> None:
    with chain(keys, {"w1": SEED, "w2": "w1"}) as swarm:
        nodes = [swarm.here("w1"), swarm.here("w2")]
        published = one_mib(keys)
        swarm.publish(published, after=2)
        for port in (swarm.seed.port, nodes[0].port):
            for name, data in HOSTILE.items():
                with RawPeer(keys, "evil", port) as evil:
                    evil.send(data)
                    assert evil.is_hung_up(), name
        await_all(published, *nodes)
        assert [node.tally().reparentings for node in nodes] == [0, 0]


def test_i9_whatever_a_certified_peer_sends_the_others_are_served(keys: RunKeys) -> None:
    random = Random(7)
    controls = [f.Beat({1: 1}), f.Warm(9), f.Want(1, "f" * 64, (), True, b""), f.Have(1, (1,)), f.Report()]
    with chain(keys, {"w1": SEED, "w2": "w1"}) as swarm:
        nodes = [swarm.here("w1"), swarm.here("w2")]
        until(lambda: len(swarm.director.reachable) == 2, "the nodes")
        for attempt in range(24):
            with RawPeer(keys, "evil", (swarm.seed.port, nodes[0].port)[attempt % 2], lane=attempt % 3) as evil:
                for _ in range(5):
                    data = bytearray(f.encode_control(random.choice(controls)))
                    for _ in range(random.choice((0, 1, 4))):
                        data[random.randrange(len(data))] = random.randrange(256)
                    with contextlib.suppress(OSError):
                        evil.send(data)
        published = one_mib(keys)
        swarm.publish(published)
        await_all(published, *nodes)


def test_i9_wants_that_make_no_sense_are_refused_or_end_the_link(keys: RunKeys) -> None:
    count = 32
    with chain(keys, {"evil": SEED, "w1": SEED}) as swarm:
        node = swarm.here("w1")
        published = one_mib(keys)
        assert len(published.manifest.chunks) == count + 1
        swarm.publish(published, after=1)
        root = published.root
        hostile = (
            f.Want(1, root, (f.Stretch(0, 2**40),), True, b""),
            f.Want(1, root, (f.Stretch(-5, 3),), True, b""),
            f.Want(1, root, (f.Stretch(0, 3, -1),), True, b""),
            f.Want(1, root, (f.Stretch(0, 3, 0),), True, b""),
            f.Want(1, root, (f.Stretch(0, -3),), True, b""),
            f.Want(1, root, (f.Stretch(0, 3, 2**40),), True, b""),
            f.Want(1, root, (), True, b"\xff" * 1000),
        )
        for want in hostile:
            with RawPeer(keys, "evil", swarm.seed.port, lane=1) as evil:
                evil.say(want)
                assert evil.is_hung_up(), want
                assert not evil.chunks, want
        await_all(published, node)


def test_i9_a_child_that_lies_about_what_it_has_only_harms_itself(keys: RunKeys) -> None:
    with chain(keys, {"evil": SEED, "w1": SEED}) as swarm:
        node = swarm.here("w1")
        published = one_mib(keys)
        swarm.publish(published, after=1)
        with RawPeer(keys, "evil", swarm.seed.port, lane=1) as evil:
            evil.say(
                f.Have(7, (0, 1, 2)),
                f.Halt(7),
                f.Want(1, published.root, (), True, b"\xff\xff\xff\xff\x01"),
                f.Have(1, (2**32 - 1, 5)),
                f.Beat({1: 2**32 - 1, 9: 0}),
                f.Want(2, published.root, (f.Stretch(3, 2),), False, b""),
            )
            until(lambda: evil.read() and evil.chunks == [3, 4], "the chunks that it asked for")
        await_all(published, node)

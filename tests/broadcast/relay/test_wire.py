"""One connection over a real TLS socket pair, with scripted ends."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from relays import RunKeys
from swarm import until

from echo2.broadcast.relay import frames as f
from echo2.broadcast.relay.wire import MOST_TAILS, Wire
from echo2.transport.tls import peer_context

LIMIT_BYTES = 1000
ROOT = "r" * 64


class ScriptedEnds:
    """Takes chunks of stream 1, remembers everything, sends what it is given."""

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.heard_times = 0
        self.chunks: list[tuple[int, bytes]] = []
        self.controls: list[f.AnyControl] = []
        self.why = ""
        self.over = threading.Event()
        self.got = threading.Semaphore(0)

    def next_frame(self, number: int, buffer: bytearray) -> memoryview | bytes:
        return self.out.pop(0) if self.out else b""

    def heard(self, number: int) -> None:
        self.heard_times += 1

    def accepts(self, number: int, stream: int, chunk: int, nbytes: int) -> str | None:
        return ROOT if stream == 1 else None

    def chunk(self, number: int, root: str, stream: int, chunk: int, data: memoryview) -> None:
        self.chunks.append((chunk, bytes(data)))
        self.got.release()

    def control(self, number: int, frame: f.AnyControl) -> None:
        self.controls.append(frame)
        self.got.release()

    def control_limit(self, number: int) -> int:
        return LIMIT_BYTES

    def ended(self, number: int, why: str) -> None:
        self.why = why
        self.over.set()


def context_of(keys: RunKeys, name: str, server: bool) -> ssl.SSLContext:
    opening = keys.opening(name)
    return peer_context(server, opening.authority_pem, opening.certificate_pem, opening.key_pem)


class Pair:
    """A wire and, at the other side of the connection, a plain TLS socket."""

    def __init__(self, keys: RunKeys) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server_socket:
            theirs = socket.create_connection(server_socket.getsockname())
            ours, _ = server_socket.accept()
        server, client = (context_of(keys, name, name == "parent") for name in ("parent", "child"))
        self.ends = ScriptedEnds()
        theirs.settimeout(10.0)
        shaken: list[ssl.SSLSocket] = []
        shaking = threading.Thread(target=lambda: shaken.append(server.wrap_socket(ours, server_side=True)))
        shaking.start()
        self.peer = client.wrap_socket(theirs)
        shaking.join(10.0)
        self.wire = Wire(7, shaken[0], self.ends)
        self.thread = threading.Thread(target=self.wire.run)
        self.thread.start()

    def close(self) -> None:
        self.wire.hang_up("the test is over")
        self.thread.join(10.0)
        self.peer.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(RunKeys(tmp_path))
    yield made
    made.close()


def header(kind: int, length: int, stream: int = 0, number: int = 0) -> bytes:
    return f.HEADER.pack(kind, 0, 0, length, stream, number)


def test_frames_arrive_whole_however_they_are_cut(pair: Pair) -> None:
    data = bytes(range(256)) * 300
    frames = f.encode_control(f.Halt(4)) + f.chunk_header(1, 9, len(data)) + data + f.encode_control(f.Halt(5))
    for start in range(0, len(frames), 1013):
        pair.peer.sendall(frames[start : start + 1013])
    for _ in range(3):
        assert pair.ends.got.acquire(timeout=10.0)
    assert pair.ends.controls == [f.Halt(4), f.Halt(5)]
    assert pair.ends.chunks == [(9, data)]


def test_a_chunk_that_nobody_wants_is_read_and_thrown_away(pair: Pair) -> None:
    pair.peer.sendall(f.chunk_header(2, 0, 100_000) + bytes(100_000) + f.padding(500) + f.encode_control(f.Halt(1)))
    assert pair.ends.got.acquire(timeout=10.0)
    assert pair.ends.controls == [f.Halt(1)] and pair.ends.chunks == []


@pytest.mark.parametrize(
    ("kind", "length"),
    [(f.CONTROL, LIMIT_BYTES + 1), (f.CONTROL, 2**32 - 1), (f.CHUNK, 2**32 - 1), (f.PADDING, 2**31), (9, 0), (0, 5)],
)
def test_a_forged_length_or_type_ends_the_connection(pair: Pair, kind: int, length: int) -> None:
    pair.peer.sendall(header(kind, length, stream=1))
    assert pair.ends.over.wait(10.0)
    assert "may announce" in pair.ends.why


def test_a_body_that_is_no_frame_ends_the_connection(pair: Pair) -> None:
    pair.peer.sendall(header(f.CONTROL, 3) + b"abc")
    assert pair.ends.over.wait(10.0)
    assert "could not be read" in pair.ends.why


def test_the_other_sides_end_is_noticed(pair: Pair) -> None:
    pair.peer.close()
    assert pair.ends.over.wait(10.0)


def test_what_the_core_chooses_is_sent_when_the_wire_is_woken(pair: Pair) -> None:
    big = f.chunk_header(3, 1, 3_000_000) + bytes(3_000_000)
    pair.ends.out += [f.encode_control(f.Halt(8)), big]
    pair.wire.wake()
    wanted = len(f.encode_control(f.Halt(8))) + len(big)
    got = 0
    while got < wanted:
        got += len(pair.peer.recv(65536))
    assert got == wanted


def test_both_directions_flow_at_once(pair: Pair) -> None:
    big = f.chunk_header(3, 1, 2_000_000) + bytes(2_000_000)
    pair.ends.out += [big] * 3
    pair.wire.wake()
    for number in range(20):
        pair.peer.sendall(f.chunk_header(1, number, 1000) + bytes(1000))
    left = 3 * len(big)
    while left:
        left -= len(pair.peer.recv(65536))
    for _ in range(20):
        assert pair.ends.got.acquire(timeout=10.0)


def test_who_takes_nothing_of_what_is_there_for_it_is_hung_up_on(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.wire.STALLED_S", 0.3)
    pair.ends.out += [f.chunk_header(3, 1, 8_000_000) + bytes(8_000_000)] * 4
    pair.wire.wake()
    assert pair.ends.over.wait(10.0)
    assert "took nothing" in pair.ends.why


def test_who_takes_little_by_little_is_not(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.wire.STALLED_S", 0.5)
    pair.ends.out += [f.chunk_header(3, 1, 8_000_000) + bytes(8_000_000)] * 4
    pair.wire.wake()
    for _ in range(12):
        assert not pair.ends.over.wait(0.1)
        for _ in range(16):
            pair.peer.recv(16384)
    assert not pair.ends.over.is_set()


def test_h01_a_slow_line_is_heard_although_something_else_wakes_the_wire_all_the_time(pair: Pair) -> None:
    """The kernel is asked to wake it for more than comes in a second."""
    pair.peer.sendall(f.chunk_header(1, 0, 2_000_000) + bytes(50_000))
    until(lambda: pair.ends.heard_times, "the first bytes")
    before = pair.ends.heard_times
    pair.peer.sendall(bytes(20_000))
    for _ in range(150):
        pair.wire.wake()
        if pair.ends.over.wait(0.01) or pair.ends.heard_times > before:
            break
    assert pair.ends.heard_times > before


def test_i9_memory_for_a_control_frame_is_taken_as_it_comes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("echo2.broadcast.relay.wire.BODY_BYTES", 16)
    frame = f.encode_control(f.Refuse(1, "x" * 200))
    pair.peer.sendall(frame[: f.HEADER.size + 1])
    until(lambda: pair.wire._frame is not None, "the header")
    assert len(pair.wire._body) == 16
    pair.peer.sendall(frame[f.HEADER.size + 1 :])
    assert pair.ends.got.acquire(timeout=10.0)
    assert pair.ends.controls == [f.Refuse(1, "x" * 200)]


def test_a_chunk_whose_end_does_not_come_does_not_keep_the_wire_awake(pair: Pair) -> None:
    pair.peer.sendall(f.chunk_header(1, 0, 1000) + bytes(990))
    until(lambda: pair.wire._tails >= MOST_TAILS, "the wire to wait for the rest as usual")
    pair.peer.sendall(bytes(10))
    assert pair.ends.got.acquire(timeout=10.0)
    assert pair.ends.chunks == [(0, bytes(1000))]

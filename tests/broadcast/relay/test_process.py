from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest
from relays import RunKeys

from echo2.broadcast.relay.channel import encode_message
from echo2.broadcast.relay.control import Alive, AnyWord, Event, Hold, Open, Tally, Whole
from echo2.broadcast.relay.process import LAST_BREATH_S, WordWriter

SCRIPT = Path(__file__).parents[2] / "support" / "scripted_relay.py"


@pytest.fixture
def opening(tmp_path: Path) -> Open:
    return RunKeys(tmp_path).opening("worker-1", seed_port=9)


def start(behaviour: str = "brings") -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), behaviour], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def words_in(data: bytes) -> list[AnyWord]:
    decoder, words = msgspec.msgpack.Decoder(AnyWord), []
    while data:
        length = int.from_bytes(data[:4], "big")
        words.append(decoder.decode(data[4 : 4 + length]))
        data = data[4 + length :]
    return words


@pytest.mark.integration
@pytest.mark.parametrize("command", [[str(SCRIPT), "brings"], ["-m", "echo2.broadcast.relay"]])
def test_without_a_program_a_relay_ends_at_once_and_says_nothing(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], input=b"", capture_output=True, timeout=30, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.integration
@pytest.mark.parametrize("behaviour", ["brings", "deaf"])
def test_a_relay_ends_with_its_program_whatever_its_threads_do(opening: Open, behaviour: str) -> None:
    with start(behaviour) as process:
        assert process.stdin and process.stdout
        process.stdin.write(encode_message(opening))
        process.stdin.flush()
        process.stdout.read(4)  # it listens
        began_s = time.monotonic()
        _, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, b"")
        assert time.monotonic() - began_s < LAST_BREATH_S + 5


@pytest.mark.integration
def test_an_interrupt_from_the_terminal_is_the_programs_to_judge(opening: Open) -> None:
    with start() as process:
        assert process.stdin and process.stdout
        process.stdin.write(encode_message(opening))
        process.stdin.flush()
        process.stdout.read(4)
        process.send_signal(signal.SIGINT)
        process.stdin.write(encode_message(Hold(("a",))))
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, b"")
        assert b"Tally" in out


@pytest.mark.integration
def test_a_relay_that_cannot_begin_says_why_in_one_sentence(opening: Open) -> None:
    broken = msgspec.structs.replace(opening, key_pem=b"junk")
    for first, code, sentence in (
        (Hold(()), 1, "a relay's first order must be to open, got Hold"),
        (msgspec.structs.replace(opening, port=1), 2, "the relay must listen on port 1 of 127.0.0.1, got: Address"),
    ):
        with start("port_taken") as process:
            out, err = process.communicate(encode_message(first), timeout=30)
        [word] = words_in(out)
        assert isinstance(word, Event) and word.kind == "relay_failed"
        assert str(word.fields["error"]).startswith(sentence)
        assert process.returncode == code
        assert err.decode() == f"echo2: {word.fields['error']}\n"
    with subprocess.Popen([sys.executable, "-m", "echo2.broadcast.relay"], stdin=-1, stdout=-1, stderr=-1) as real:
        _, err = real.communicate(encode_message(broken), timeout=30)
    assert real.returncode == 1
    assert err.decode().startswith("echo2: a relay needs the run's CA certificate") and len(err.splitlines()) == 1


def test_words_come_in_order_and_a_tally_gives_way_to_the_next() -> None:
    class Pipe(io.BytesIO):
        def close(self) -> None:
            pass

    pipe = Pipe()
    writer = WordWriter(pipe)
    said = [Whole("a" * 64, "/a"), Event("kind", {}), Whole("b" * 64, "/b")]
    for word in said:
        writer.say(word)
        writer.say(Tally(1, 1, 1, {}))
        writer.say(Tally(2, 2, 2, {}))
    writer.close()
    words = words_in(pipe.getvalue())
    assert [word for word in words if not isinstance(word, Tally | Alive)] == said
    assert words[-1] == Tally(2, 2, 2, {})


def test_nobody_waits_for_a_program_that_does_not_read() -> None:
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb") as unread, os.fdopen(write_end, "wb") as pipe:
        writer = WordWriter(pipe)
        began_s = time.monotonic()
        for _ in range(1000):
            writer.say(Event("kind", {"text": "x" * 1000}))  # far more than a pipe holds
        assert time.monotonic() - began_s < 5
        os.set_blocking(read_end, False)
        read = 0
        deadline_s = time.monotonic() + 20
        while read < 1_000_000 and time.monotonic() < deadline_s:
            read += len(unread.read(1 << 20) or b"")
        writer.close()
        assert read >= 1_000_000

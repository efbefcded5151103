from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

from echo2.shell import ConsoleEvents, RandomIds, SystemClock

SOURCE = Path(__file__).parent.parent / "src"

PROGRAM = """
import asyncio, sys
from echo2 import shell

shell.LAST_BREATH_S = 0.5

async def main():
    print("ready", flush=True)
    await stop.wait()
    print("left in order", flush=True)

async def start():
    global stop
    stop = asyncio.Event()
    def on_stop(reason):
        print(reason, flush=True)
        if "deaf" not in sys.argv:
            stop.set()
    await shell.run_program(main(), on_stop)

try:
    asyncio.run(start())
except BaseException as error:
    print(f"{type(error).__name__}: {error}", flush=True)
"""


def start(*arguments: str, lifeline: bool = True) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "ECHO2_LIFELINE": "1" if lifeline else "0"}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def rest(process: subprocess.Popen[str]) -> str:
    """What it still says; its standard input stays as it is until it has ended."""
    assert process.stdout is not None
    with process.stdout as stream:
        out = stream.read()
    process.wait(timeout=20)
    if process.stdin is not None:
        process.stdin.close()
    return out


def test_a_signal_asks_for_the_end_and_says_which() -> None:
    process = start()
    process.send_signal(signal.SIGTERM)
    assert rest(process) == "received SIGTERM\nleft in order\n"
    assert process.returncode == 0


def test_a_second_signal_does_not_wait_for_order() -> None:
    process = start("deaf")
    process.send_signal(signal.SIGINT)
    assert process.stdout is not None
    assert process.stdout.readline() == "received SIGINT\n"
    process.send_signal(signal.SIGINT)
    assert rest(process) == "KeyboardInterrupt: \n"


def test_a_program_does_not_outlive_its_supervisor() -> None:
    process = start()
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    assert rest(process) == "Starved: the supervisor of this program is gone, and the program ends with it\n"


def test_without_a_supervisor_standard_input_means_nothing() -> None:
    process = start(lifeline=False)
    assert process.stdin is not None
    process.stdin.close()
    process.stdin = None
    process.send_signal(signal.SIGTERM)
    assert rest(process) == "received SIGTERM\nleft in order\n"


def test_events_are_one_line_each_and_waiting_is_said_in_words() -> None:
    stream = io.StringIO()
    events = ConsoleEvents("worker w0", stream)
    events.emit("installed", policy="0.4")
    events.emit("coordinator_unreachable", request="Hello", error="connection\nrefused", retry_in_s=3.25)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("worker w0: installed: policy=0.4")
    assert second.endswith("worker w0: coordinator unreachable: connection refused; trying again in 3.2 s")


def test_real_clocks_and_ids() -> None:
    clock = SystemClock()
    assert clock.monotonic() <= clock.monotonic()
    assert clock.wall() > 1.7e9
    assert RandomIds().new("lease") != RandomIds().new("lease")

"""A wide-area network on one machine: a network namespace per host, an emulator between them.

Invariant: what a ``Network`` made goes when it is closed, by the names it gave; what a killed process left behind is
removed by the next ``Network``. Nothing outside its own namespaces is touched, and no packet leaves them.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

PREFIX = "echo2b"
SHARED_MEMORY = Path("/dev/shm")
"""Objects lie in memory, so that no disk is measured."""


class Unavailable(Exception):
    """This machine cannot carry the emulated network; the message says what is missing."""


@dataclass(frozen=True)
class Host:
    """Rates of one host's line, in bytes per second."""

    up_bytes_per_s: float
    down_bytes_per_s: float


@dataclass(frozen=True)
class Conditions:
    """What holds between any two hosts."""

    rtt_s: float
    loss: float = 0.0
    """Probability per frame, each way."""
    queue_s: float = 0.2
    """Length of the queues before each uplink and downlink, as time at the line's rate; then the tail is dropped."""


@dataclass(frozen=True)
class Window:
    """What the emulator saw between two calls of ``Network.window``."""

    wall_s: float
    core_share: float
    """Share of one core that the emulator was busy, the kernel's delivery of its packets included."""
    latest_s: float
    """How late it was with a packet, at most."""
    lost: int
    """Bursts lost by chance."""
    sent_bytes: tuple[int, ...]
    """Per host, as frames on its uplink."""
    dropped: tuple[int, ...]
    """Per host, by its full queues."""


def require() -> None:
    """Raises Unavailable where the network could not be made."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    if not Path("/dev/net/tun").exists():
        raise Unavailable("there is no /dev/net/tun")
    for program in ("ip", "cc"):
        if shutil.which(program) is None:
            raise Unavailable(f"the program {program} is not installed")


class Network:
    """Context manager. Host ``k`` is ``address(k)``; ``command(k, …)`` runs there."""

    def __init__(self, hosts: Sequence[Host], conditions: Conditions) -> None:
        if not 0 < len(hosts) < 250:
            raise ValueError(f"a network has 1 to 249 hosts, got {len(hosts)}")
        self._hosts = tuple(hosts)
        self._conditions = conditions
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        require()
        sweep()
        with ExitStack() as stack:
            self.folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{PREFIX}{os.getpid()}-", dir=SHARED_MEMORY))
            )
            self._emulator = self._start_emulator(stack)
            stack.callback(_delete_namespaces, os.getpid())
            self._wire()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @staticmethod
    def address(host: int) -> str:
        return f"10.66.0.{host + 1}"

    @staticmethod
    def command(host: int, *arguments: str) -> list[str]:
        """Arguments of a process on ``host``; ``ip`` replaces itself by it, so its process id is the program's."""
        return ["ip", "netns", "exec", _namespace(host), *arguments]

    def window(self) -> Window:
        """What happened since the last call."""
        assert self._emulator.stdin is not None
        assert self._emulator.stdout is not None
        self._emulator.stdin.write("\n")
        self._emulator.stdin.flush()
        wall, busy, latest, lost, *counts = self._emulator.stdout.readline().split()
        return Window(
            wall_s=float(wall),
            core_share=float(busy) / float(wall),
            latest_s=float(latest),
            lost=int(lost),
            sent_bytes=tuple(int(count) for count in counts[::2]),
            dropped=tuple(int(count) for count in counts[1::2]),
        )

    def _start_emulator(self, stack: ExitStack) -> subprocess.Popen[str]:
        program = self.folder / "emulator"
        source = Path(__file__).with_name("emulator.c")
        try:
            subprocess.run(["cc", "-O2", "-o", program, source], check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"the emulator does not compile here: {error.stderr.strip()[:300]}") from None
        rates = [f"{host.up_bytes_per_s:.0f}:{host.down_bytes_per_s:.0f}" for host in self._hosts]
        line = self._conditions
        arguments = [str(program), _device(""), str(line.rtt_s / 2), str(line.loss), str(line.queue_s), *rates]
        emulator = stack.enter_context(
            subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
        stack.callback(emulator.terminate)
        assert emulator.stdout is not None
        assert emulator.stderr is not None
        if emulator.stdout.readline() != "ready\n":
            raise Unavailable(f"the emulator did not start: {emulator.stderr.read().strip()[:300]}")
        return emulator

    def _wire(self) -> None:
        hosts = range(len(self._hosts))
        _ip_batch([f"netns add {_namespace(host)}" for host in hosts])
        _ip_batch([f"link set {_device(str(host))} netns {_namespace(host)}" for host in hosts])
        own_core, others = _cores()
        os.sched_setaffinity(self._emulator.pid, {own_core})
        for host in hosts:
            device = _device(str(host))
            _ip_batch(
                [
                    "link set lo up",
                    f"addr add {self.address(host)}/16 dev {device}",
                    f"link set {device} up txqueuelen 5000",
                ],
                namespace=_namespace(host),
            )
            settings = self._settings(device, others)
            subprocess.run(self.command(host, "sh", "-c", settings), check=True, stderr=subprocess.DEVNULL)

    def _settings(self, device: str, others: int) -> str:
        """Shell commands for the kernel of one host; where one is refused the emulator saturates sooner and says so.

        No scheme learns from the one before it. Paced TCP sends bursts of 1 ms and 8 or 16 KB more (64 KB shifted down
        by the RTT in microseconds after ``shifts``, which is 2 or 3), because packets are what costs here, not bytes.
        A host's TCP is not the emulator's work: it is done on the other cores.
        """
        shifts = int(math.log2(max(self._conditions.rtt_s * 1e6 / 2, 1)))
        return (
            "echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save;"
            f"echo {shifts} > /proc/sys/net/ipv4/tcp_tso_rtt_log;"
            f"echo {others:x} > /sys/class/net/{device}/queues/rx-0/rps_cpus; true"
        )


def sweep() -> None:
    """Remove what runs that no longer live have left: namespaces that carry their process ids, with what still hangs
    in them, and folders."""
    names = {path.name for path in (*Path("/run/netns").glob(f"{PREFIX}*"), *SHARED_MEMORY.glob(f"{PREFIX}*"))}
    owners = {name.removeprefix(PREFIX).partition("-")[0] for name in names}
    for owner in (int(owner) for owner in owners if owner.isdigit()):
        if not Path(f"/proc/{owner}").exists():
            _delete_namespaces(owner)
            for folder in SHARED_MEMORY.glob(f"{PREFIX}{owner}-*"):
                shutil.rmtree(folder, ignore_errors=True)


def _cores() -> tuple[int, int]:
    """The emulator's core, and a bit mask of the others."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[-1], sum(1 << core for core in cores[:-1])


def _namespace(host: int) -> str:
    return f"{PREFIX}{os.getpid()}-{host}"


def _device(number: str) -> str:
    return f"e2b{os.getpid()}.{number}"


def _delete_namespaces(owner: int) -> None:
    names = [path.name for path in Path("/run/netns").glob(f"{PREFIX}{owner}-*")]
    for name in names:
        inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout
        for process in inside.split():
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
    _ip_batch([f"netns del {name}" for name in names])


def _ip_batch(commands: Sequence[str], *, namespace: str | None = None) -> None:
    where = [] if namespace is None else ["-n", namespace]
    try:
        subprocess.run(
            ["ip", *where, "-batch", "-"], input="\n".join(commands), check=True, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"ip {' '.join(where)} refused: {error.stderr.strip()[:300]}") from None

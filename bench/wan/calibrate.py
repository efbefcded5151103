"""What the emulated network does, before anything is measured on it: ``python -m bench.wan.calibrate``.

Invariant: plain TCP only, so a wrong figure here is the network's. Prints one JSON object: the time to connect (should
be the RTT), and the goodput of a ring in which every host sends to the next at once (should be the rate divided by
1.046, what headers cost), with the emulator's share of a core.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys

from bench.wan.measure import EMULATOR_LIMIT
from bench.wan.network import Conditions, Host, Network, Unavailable

_PEER = """
import socket, sys, threading, time
_, address, seconds = sys.argv
server = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
sys.stdin.readline()
out = socket.socket()
began = time.monotonic()
out.connect((address, 5000))
print(time.monotonic() - began, flush=True)
sys.stdin.readline()
def send():
    while True:
        out.sendall(bytes(1 << 18))
threading.Thread(target=send, daemon=True).start()
source, buffer, received = server.accept()[0], bytearray(1 << 20), 0
skip = time.monotonic() + 2  # slow start
end = skip + float(seconds)
while (now := time.monotonic()) < end:
    count = source.recv_into(buffer)
    received += count if now > skip else 0
print(received / float(seconds), flush=True)
sys.stdin.readline()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=16)
    parser.add_argument("--mbps", type=float, default=50.0)
    parser.add_argument("--rtt-ms", type=float, default=40.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    options = parser.parse_args()
    try:
        print(json.dumps(calibrate(options.hosts, options.mbps, options.rtt_ms, options.seconds)))
    except Unavailable as reason:
        print(json.dumps({"skipped": str(reason)}))


def calibrate(hosts: int, mbps: float, rtt_ms: float, seconds: float) -> dict[str, float | bool]:
    rate = mbps * 1e6 / 8
    with Network([Host(rate, rate)] * hosts, Conditions(rtt_s=rtt_ms / 1e3)) as network:
        peers = []
        for host in range(hosts):
            command = network.command(
                host, sys.executable, "-c", _PEER, network.address((host + 1) % hosts), str(seconds)
            )
            peers.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,  # who sends to a peer that is done complains
                    text=True,
                )
            )
        try:
            for peer in peers:
                _answer(peer)
            connects = []
            for peer in peers:  # one after the other: the time of an idle network
                _tell(peer)
                connects.append(float(_answer(peer)))
            for peer in peers:
                _tell(peer)
            network.window()
            goodputs = [8 * float(_answer(peer)) / 1e6 for peer in peers]
            window = network.window()
        finally:
            for peer in peers:
                peer.kill()
                peer.wait()
                for stream in (peer.stdin, peer.stdout):
                    assert stream is not None
                    stream.close()
    return {
        "hosts": hosts,
        "mbps": mbps,
        "rtt_ms": rtt_ms,
        "connect_ms": 1e3 * statistics.median(connects),
        "goodput_mbps_median": statistics.median(goodputs),
        "goodput_mbps_least": min(goodputs),
        "carried_mbps": 8 * sum(window.sent_bytes) / window.wall_s / 1e6,
        "emulator_core_share": window.core_share,
        "latest_ms": 1e3 * window.latest_s,
        "inconclusive": window.core_share > EMULATOR_LIMIT,
    }


def _answer(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    return peer.stdout.readline()


def _tell(peer: subprocess.Popen[str]) -> None:
    assert peer.stdin is not None
    peer.stdin.write("\n")
    peer.stdin.flush()


if __name__ == "__main__":
    main()

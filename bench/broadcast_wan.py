"""How long a broadcast takes over an emulated wide-area network: ``python -m bench.broadcast_wan``.

Invariant: every scheme meets the same network in the same run, and a run in which the emulator may have been the limit
says so. Prints one JSON object. See bench/README.md for what the figures mean.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.wan.measure import MIB, Fault, lower_bound_s, summarise
from bench.wan.network import Conditions, Host, Network, Unavailable
from bench.wan.processes import Broken
from bench.wan.relays import Relays
from bench.wan.scheme import Scheme, time_transfer

from echo2.broadcast.parse import chunk_size_for
from echo2.broadcast.plan.model import Topology

HOP, TORRENT = "hop", "libtorrent"
"""One worker alone, over our relay: what a chain is compared with; and the baseline."""
SCHEMES = (HOP, *(topology.value for topology in Topology), TORRENT)
WARM_UP_BYTES = 16 * MIB
PATIENCE = 6.0
"""A transfer is given up after so many times what a star would need."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # an orderly end, like ^C
    try:
        report = measure(options)
    except Unavailable as reason:
        report = {"skipped": str(reason)}
    except Broken as error:
        print(f"broadcast_wan: {error}", file=sys.stderr)
        return 1
    text = json.dumps(report, indent=1)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    return 0


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The whole report. Raises Unavailable, Broken."""
    if TORRENT in options.scheme and importlib.util.find_spec("libtorrent") is None:
        raise Unavailable("the baseline is not installed: pip install libtorrent==2.1.1, or leave it out of --scheme")
    seed = _host(options.seed_mbps or 8 * options.worker_mbps, options.seed_mbps or 8 * options.worker_mbps)
    workers = [_host(options.up_mbps or options.worker_mbps, options.worker_mbps)] * options.workers
    conditions = Conditions(options.rtt_ms / 1e3, options.loss, options.queue_ms / 1e3)
    schemes: dict[str, Any] = {}
    with Network([seed, *workers], conditions) as network:
        for name in options.scheme:
            print(f"broadcast_wan: {name} …", file=sys.stderr, flush=True)
            schemes[name] = _measure_scheme(name, network, seed, workers, options)
    return {
        "bench": "broadcast_wan",
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "machine": {"cores": os.cpu_count(), "kernel": platform.release(), "python": platform.python_version()},
        "bound_share_s": round(lower_bound_s(options.mib * MIB, seed, workers, options.share), 3),
        "bound_all_s": round(lower_bound_s(options.mib * MIB, seed, workers, 1.0), 3),
        "tau_s": round(_per_hop_s(options.mib * MIB, workers[0], conditions), 4),
        "comparisons": _comparisons(schemes, _per_hop_s(options.mib * MIB, workers[0], conditions)),
        "inconclusive": sorted(name for name, result in schemes.items() if _is_inconclusive(result)),
        "schemes": schemes,
    }


def _measure_scheme(
    name: str, network: Network, seed: Host, workers: Sequence[Host], options: argparse.Namespace
) -> dict[str, Any]:
    reached = workers[:1] if name == HOP else workers

    def transfer(scheme: Scheme, nbytes: int, repeat: int, fault: Fault | None = None) -> dict[str, Any]:
        bounds_s = tuple(lower_bound_s(nbytes, seed, reached, share) for share in (options.share, 1.0))
        star_s = nbytes / seed.up_bytes_per_s * len(reached) + max(bounds_s)
        runs = [time_transfer(scheme, network, nbytes, PATIENCE * star_s + 30.0, fault) for _ in range(repeat)]
        return summarise(runs, nbytes, options.share, (bounds_s[0], bounds_s[1]))

    with _scheme(name, network, len(reached)) as scheme:
        first = [transfer(scheme, min(WARM_UP_BYTES, options.mib * MIB), 1)["all_s"] for _ in range(options.warm_up)]
        result = {"warm_up_all_s": first, **transfer(scheme, options.mib * MIB, options.repeat), **scheme.details()}
        if options.delta_mib:
            result["delta"] = {**transfer(scheme, options.delta_mib * MIB, options.repeat), **scheme.details()}
        if options.fault and name != HOP:
            fault = Fault(options.fault)
            result[fault.value] = {**transfer(scheme, options.mib * MIB, 1, fault), **scheme.details()}
    return result


def _scheme(name: str, network: Network, workers: int) -> Scheme:
    if name == TORRENT:
        from bench.wan.torrent import Torrent  # only where it is asked for must libtorrent be there

        return Torrent(network, workers)
    return Relays(network, workers, Topology.CHAIN if name == HOP else Topology(name), name)


def _comparisons(schemes: dict[str, Any], tau_s: float) -> dict[str, float]:
    """The ratios that the goals are stated in."""
    ratios: dict[str, float] = {}
    for name, result in schemes.items():
        if name in (HOP, TORRENT):
            continue
        if HOP in schemes:
            hop_s = schemes[HOP]["all_s"]
            ratios[f"{name}_all_less_depth_over_hop"] = (result["all_s"] - max(result["depth"] - 1, 0) * tau_s) / hop_s
        if TORRENT in schemes:
            ratios[f"{TORRENT}_over_{name}_share"] = schemes[TORRENT]["share_s"] / result["share_s"]
            ratios[f"{TORRENT}_over_{name}_all"] = schemes[TORRENT]["all_s"] / result["all_s"]
        for fault in Fault:
            if fault.value in result:
                ratios[f"{name}_{fault.value}_costs_s"] = result[fault.value]["all_s"] - result["all_s"]
    return {key: round(value, 3) for key, value in ratios.items()}


def _is_inconclusive(result: dict[str, Any]) -> bool:
    parts = (result, *(part for part in result.values() if isinstance(part, dict)))
    return any(part.get("inconclusive", False) for part in parts)


def _per_hop_s(nbytes: int, worker: Host, conditions: Conditions) -> float:
    """tau = c / r + l: what a hop adds at least."""
    rate = min(worker.up_bytes_per_s, worker.down_bytes_per_s)
    return chunk_size_for(nbytes) / rate + conditions.rtt_s / 2


def _host(up_mbps: float, down_mbps: float) -> Host:
    return Host(up_mbps * 1e6 / 8, down_mbps * 1e6 / 8)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0] if __doc__ else None, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--workers", type=int, default=16, help="W; host 0 is the learner's side")
    add("--worker-mbps", type=float, default=50.0, help="B_w, down, and up unless --up-mbps says otherwise")
    add("--up-mbps", type=float, help="a worker's uplink (default: B_w)")
    add("--seed-mbps", type=float, help="B_0 (default: 8 B_w)")
    add("--rtt-ms", type=float, default=40.0)
    add("--loss", type=float, default=0.0, help="probability per frame, each way; 0.001 is 0.1 %%")
    add("--queue-ms", type=float, default=200.0, help="length of each line's queue, at the line's rate")
    add("--mib", type=int, default=128, help="G")
    add("--share", type=float, default=0.9, help="q: the share of workers whose time counts first")
    add("--repeat", type=int, default=1, help="transfers of each kind; the median counts")
    add("--warm-up", type=int, default=6, help="objects of 16 MiB before; a seed learns its uplink from several")
    add("--scheme", nargs="+", choices=SCHEMES, default=[HOP, "star", "chain", "ring", TORRENT])
    add("--delta-mib", type=int, default=0, help="then also an object of so many MiB over the same, warm links")
    faults = parser.add_mutually_exclusive_group()
    strike = "then also a transfer in which the relay in the middle of the longest chain is {} at 40 %%"
    add_fault = faults.add_argument
    add_fault("--kill", dest="fault", action="store_const", const="kill", help=strike.format("killed"))
    add_fault("--freeze", dest="fault", action="store_const", const="freeze", help=strike.format("frozen"))
    add("--json", type=Path, help="also write the report to this file")
    return parser


if __name__ == "__main__":
    sys.exit(main())

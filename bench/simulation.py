"""How fast a run is simulated, by number of workers, on one core.

    python -m bench.simulation                                  10, 100, 1,000 and 10,000 workers
    python -m bench.simulation --workers 100 --relays none      one world; see --help

The world: a training step takes 100 virtual seconds and R = 16 trajectories for every eighth of the workers; engines
are such that the pool delivers 1.1 R per step; a delta of 40 MB every third step, by chains of relays; lines of
100 Mbit/s. Every program is the production one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import time
from typing import Any

from echo2.config.load import build_config
from echo2.simulation.coin import NAME
from echo2.simulation.loop import VirtualLoop, run_virtual
from echo2.simulation.models import LearnerModel, WorkerModel, WorldModel
from echo2.simulation.world import World

GROUP, T_TRAIN_S, SPREAD = 16, 100.0, 0.2
STEPS = {10: 100, 100: 100, 1_000: 100, 10_000: 20}
PIECES = {10: 32, 100: 32}
"""Of an object; 4 in larger worlds."""


def world_of(workers: int, steps: int, relays: str, pieces: int) -> World:
    prompts = max(2, round(workers / 8))
    group_s = workers * T_TRAIN_S / (1.1 * prompts)
    tables: dict[str, Any] = {
        "run": {"steps": steps},
        "tasks": [{"name": NAME}],
        "rollout": {
            "engine": "scripted", "rollouts_per_step": prompts * GROUP, "group_size": GROUP,
            "episode_timeout_s": 3600.0,
        },
        "staleness": {"budget": 11, "publish_period": 3},
        "coordinator": {"stall_s": 3000.0},
    }  # fmt: skip
    model = WorldModel(
        learner=LearnerModel(train_s=T_TRAIN_S), uplink_bytes_per_s=1e8, delta_bytes=40e6, relays=relays, pieces=pieces
    )
    fleet = [WorkerModel(f"w{number:05}", group_s=group_s, spread=SPREAD) for number in range(workers)]
    return World(build_config(tables, check_places=False), model, fleet, seed=1)


def measure(workers: int, steps: int, relays: str, pieces: int) -> dict[str, object]:
    async def main() -> tuple[World, int, float]:
        world = world_of(workers, steps, relays, pieces)
        await world.run(None)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop), "virtual time"
        return world, loop.callbacks, loop.time()

    began_s, cpu_s = time.perf_counter(), time.process_time()
    world, callbacks, virtual_s = run_virtual(main())
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    last = world.lines.metrics[-1]
    return {
        "workers": workers,
        "steps": steps,
        "wall_s": round(wall_s, 2),
        "cpu_s": round(cpu_s, 2),
        "virtual_s": round(virtual_s),
        "events": callbacks,
        "us_per_event": round(1e6 * cpu_s / callbacks, 2),
        "log_lines": len(world.events.events),
        "trajectories": last.generated,
        "us_per_trajectory": round(1e6 * cpu_s / last.generated, 1),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "bubble_ratio": round(last.bubble_ratio, 4),
        "t_bcast_predicted_s": last.t_bcast_predicted_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--steps", type=int, default=0, help="training steps; 0: 100, and 20 of 10,000 workers")
    parser.add_argument("--relays", choices=("none", "planned", "nodes"), default="planned")
    parser.add_argument("--pieces", type=int, default=0, help="of an object; 0: 32, and 4 of 1,000 workers and more")
    asked = parser.parse_args()
    worlds = []
    for workers in asked.workers:
        steps, pieces = asked.steps or STEPS.get(workers, 20), asked.pieces or PIECES.get(workers, 4)
        # A process each: peak memory is a process's.
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            worlds.append(pool.apply(measure, (workers, steps, asked.relays, pieces)))
    print(json.dumps({"bench": "simulation", "relays": asked.relays, "worlds": worlds}, indent=2))


if __name__ == "__main__":
    main()

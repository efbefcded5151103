"""Figures 3b and 6: the reward at the end of training, against the age of what is trained on, for every objective.

``python experiments/staleness/run.py`` goes through the runs of a stage in order of worth. Each is one line of
``results.jsonl``, written when it ends; runs that stand there are skipped, so it can be stopped and started at any
time. Several shares may run at once: ``--share 0/2`` and ``--share 1/2``. ``--summary`` runs nothing and writes
``summary.json``, the table and the figures from the lines that are there.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments import training
from experiments.staleness import cells, results

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", choices=sorted(cells.STAGES), default="all")
    parser.add_argument("--share", default="0/1", metavar="I/N", help="every Nth run from the Ith on, from 0")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins later than this")
    parser.add_argument("--models", type=Path, default=training.RUNS / "staleness", metavar="DIR", help="versions 0")
    parser.add_argument("--summary", action="store_true", help="run nothing, sum up")
    arguments = parser.parse_args()
    if arguments.summary:
        from experiments.staleness import summary

        summary.write(HERE, results.read(RESULTS))
        return
    try:
        wanted = cells.of_share(cells.STAGES[arguments.stage], arguments.share)
    except ValueError as error:
        parser.error(str(error))
    run(wanted, arguments.models.resolve(), until_s=time.monotonic() + 60 * arguments.minutes)


def run(wanted: list[cells.Cell], models: Path, until_s: float) -> None:
    from experiments.staleness.replay import replay
    from experiments.staleness.tasks import TASKS

    logging.getLogger("echo2.learning").setLevel(logging.ERROR)  # what it would warn of is counted in the results
    for cell in wanted:
        if time.monotonic() >= until_s:
            return
        if cell in results.done(results.read(RESULTS)):
            continue
        task = TASKS[cell.task]
        found = replay(task, cells.METHODS[cell.method], cell.staleness, cell.seed, models)
        line = {**cell._asdict(), "lr": task.lr, **found}
        results.append(RESULTS, line)
        print(*cell, f"{results.final(line):.3f}", f"{found['cpu_s']:.0f} s", flush=True)


if __name__ == "__main__":
    main()

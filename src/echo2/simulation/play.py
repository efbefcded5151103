"""A scenario, played to its end and checked.

Invariant (I10): the same scenario and seed give the same events, lines and outcome, in whichever process; no outcome is
told of a run that broke a promise (``checks``).
"""

from __future__ import annotations

import msgspec

from echo2.simulation.checks import check_run
from echo2.simulation.lines import OnStep
from echo2.simulation.loop import Deadlock, Overdue
from echo2.simulation.outcome import Outcome, outcome
from echo2.simulation.scenario import Scenario
from echo2.simulation.story import Story
from echo2.simulation.world import SimulatedRun, simulate

SECONDS_PER_H = 3600.0


class Played(msgspec.Struct, frozen=True):
    run: SimulatedRun
    outcome: Outcome
    missed: list[str]
    """A sentence for each event that came to nothing."""


def play(scenario: Scenario, on_step: OnStep | None = None) -> Played:
    """Raises Deadlock when nothing can go on or the horizon passed, Starved when the run's own watchdog ended it,
    BrokenPromise."""
    config, story = scenario.config, Story(scenario.events)
    try:
        run = simulate(
            config,
            scenario.worker_models(),
            seed=scenario.world.seed,
            model=scenario.world_model(),
            scenario=story.tell,
            machines=scenario.machine_models(),
            until_s=scenario.world.horizon_h * SECONDS_PER_H,
            on_step=on_step,
        )
    except Deadlock as error:
        raise Deadlock(_sentence(error, scenario, story.lines.steps)) from error
    check_run(run.metrics, run.events, run.weights, config.staleness_budget)
    found = outcome(run.metrics, run.events, run.ended_s, config.run.steps, scenario.world.warm_up_steps)
    return Played(run, found, story.missed())


def _sentence(error: Deadlock, scenario: Scenario, steps: int) -> str:
    """Without the list of who waits for what, which is as long as the world is large."""
    if isinstance(error, Overdue):
        return (
            f"the run must end within world.horizon_h = {scenario.world.horizon_h:g} h, and {steps} of "
            f"{scenario.config.run.steps} steps were trained by then: raise it, or ask for fewer steps"
        )
    return f"{str(error).splitlines()[0]}; ECHO2_DEBUG=1 lists who waits for what"

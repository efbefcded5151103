"""The command tree. Commands import what they run inside their functions, so that ``--help`` loads no torch.

echo2 train · coordinator · learner · worker      run
echo2 plan · simulate                             know before you spend
echo2 status · stop                               look at and end a run
echo2 eval · task · export · snapshot             use a task, a model, a snapshot
echo2 bench                                       measure this machine
"""

from __future__ import annotations

from typing import Annotated

import typer

from echo2.cli import bench, evaluate, export, people, plan, programs, simulate, snapshot, task, train

app = typer.Typer(
    name="echo2",
    help="Reinforcement-learning post-training of language models with one learner and distant rollout workers.",
    no_args_is_help=False,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command("train")(train.train)
app.command("plan")(plan.plan)
app.command("simulate")(simulate.simulate)
app.command("coordinator")(programs.coordinator)
app.command("learner")(programs.learner)
app.command("worker")(programs.worker)
app.command("status")(people.status)
app.command("stop")(people.stop)
app.command("eval")(evaluate.evaluate)
app.command("export")(export.export)
app.add_typer(task.app, name="task")
app.add_typer(snapshot.app, name="snapshot")
app.add_typer(bench.app, name="bench")


def _print_version(wanted: bool) -> None:
    if wanted:
        from echo2.version import VERSION

        print(VERSION)
        raise typer.Exit


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; ECHO2_DEBUG=1 does the same.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models with one learner and distant rollout workers."""

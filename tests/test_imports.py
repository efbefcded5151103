"""Imports point one way, heavy or impure ones stay where they belong, and light things stay light (DESIGN §3)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "echo2"

VOCABULARY = frozenset(
    {"types", "errors", "metrics", "config", "ports", "transport", "durable", "version", "shell", "pace", "cores"}
)
PLANES = frozenset({"data", "rollout", "learning", "broadcast", "provisioning"})
PROGRAMS = frozenset({"coordinator", "learner", "worker", "run", "report"})
LAYER = (
    dict.fromkeys(VOCABULARY, 0)
    | dict.fromkeys(PLANES, 1)
    | dict.fromkeys(PROGRAMS, 2)
    | {"simulation": 3, "cli": 4, "__main__": 5, "__init__": 5}
)

IMPURE = frozenset(
    {
        "concurrent", "multiprocessing", "os", "queue", "secrets", "selectors", "signal", "socket", "sqlite3", "ssl",
        "subprocess", "threading", "time", "uuid", "aiohttp", "uvicorn", "starlette",
    }
)  # fmt: skip
"""What runs in virtual time must not touch (PROTOCOL §7); `random` only by its seeded class."""

VIRTUAL = (
    "coordinator/program.py", "coordinator/books.py", "coordinator/worker_desk.py", "coordinator/learner_desk.py",
    "coordinator/fleet.py", "coordinator/history.py", "coordinator/seat.py", "coordinator/evaluation.py",
    "coordinator/scoreboard.py", "coordinator/publishing.py", "coordinator/watchdog.py", "coordinator/wakeup.py",
    "coordinator/enrolment.py", "coordinator/operations.py", "coordinator/lines.py", "coordinator/anchors.py",
    "learner/program.py", "worker/program.py", "worker/installer.py", "worker/course.py", "worker/outbox.py",
    "worker/pulse.py", "worker/residence.py",
    "transport/patience.py", "transport/enrolment.py", "transport/messages.py",
    "transport/base_messages.py", "transport/worker_messages.py", "transport/learner_messages.py",
    "transport/people_messages.py", "transport/progress.py", "coordinator/relays.py", "coordinator/status.py",
    "coordinator/outcasts.py", "coordinator/rescoring.py", "data/rescoring.py",
    *(f"data/sandbox/{name}.py" for name in ("keys", "log", "opponents", "play", "players", "recorded", "replies",
                                             "sandbox", "table")),
    *(f"data/sandbox/poker/{name}.py" for name in ("actions", "bots", "cards", "game", "hand", "pots", "text")),
    *(f"data/sandbox/moba/{name}.py" for name in ("bots", "game", "lane", "view")),
    "data/buffer.py", "data/groups.py", "data/ledger.py", "data/admission.py", "data/lease_gate.py", "data/cursor.py",
    "rollout/episode.py", "rollout/engine.py", "rollout/alternation.py", "rollout/engines/scripted.py",
    "broadcast/signing.py", "broadcast/parse.py", "broadcast/layout.py", "broadcast/manifest.py",
    "broadcast/catalogue.py", "broadcast/keeping.py", "broadcast/shelf.py",
    *(f"broadcast/plan/{name}.py" for name in ("bound", "chain", "draft", "fluid", "hybrid", "lines", "make", "model",
                                               "repair", "ring", "star", "tree")),
    *(f"broadcast/director/{name}.py" for name in ("assignments", "director", "fleet", "late", "pacing", "rates",
                                                   "rounds", "transfer")),
    *(f"broadcast/relay/{name}.py" for name in ("frames", "intake", "links", "meter", "node", "receiver", "redial",
                                                "seed", "server", "serving", "standing", "unreachable")),
    *(f"provisioning/{name}.py" for name in ("budget", "capacity", "controller", "decisions", "drive", "excess",
                                             "ledger", "market", "observation", "orders", "rates", "roster", "rules",
                                             "tariff", "view")),
    "types.py", "errors.py", "ports.py", "metrics.py",
)  # fmt: skip
"""What the simulator runs as it is."""

TORCH_HOMES = ("learning/", *(f"rollout/engines/{name}.py" for name in (
    "transformers", "decoding", "reading", "rows", "slots", "prefixes", "attention", "sampling", "shared", "weights",
)))  # fmt: skip


def modules() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported(path: Path, *, everywhere: bool = True) -> set[str]:
    """Absolute names of modules that ``path`` imports, type-checking blocks left out."""
    tree = ast.parse(path.read_text())
    found: set[str] = set()
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += node.orelse
            continue
        if not everywhere and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports name the whole module"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names if node.module == "echo2"}
        pending += ast.iter_child_nodes(node)
    return found


def part_of(module: str) -> str:
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_one_way(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return  # names are loaded when they are first used
    assert own in LAYER, f"{own} must have a place among the layers"
    for module in imported(path):
        if not module.startswith("echo2"):
            continue
        other = part_of(module)
        if other in (own, "__init__") or module.removeprefix("echo2.") in ("",):
            continue
        assert LAYER[other] <= LAYER[own], f"{path.name} ({own}) must not import {module}"
        if own in PLANES and other in PLANES:
            assert (own, other) == ("rollout", "data"), f"plane {own} must not import plane {other}"


@pytest.mark.parametrize("name", VIRTUAL)
def test_what_runs_in_virtual_time_touches_no_real_thing(name: str) -> None:
    path = SOURCE / name
    roots = {module.split(".")[0] for module in imported(path)}
    assert not roots & IMPURE, f"{name} must reach {sorted(roots & IMPURE)} through a port"
    text = path.read_text()
    assert "import random\n" not in text, f"{name} must draw from a seeded Random, not from the module's own state"
    for call in ("to_thread", "run_in_executor", "uuid4", "datetime.now", " hash("):
        assert call not in text, f"{name} must not use {call.strip()}"


def test_torch_is_imported_in_its_homes_only() -> None:
    for path in modules():
        name = str(path.relative_to(SOURCE))
        if not name.startswith(TORCH_HOMES):
            roots = {module.split(".")[0] for module in imported(path)}
            assert not roots & {"torch", "safetensors.torch"}, f"{name} must not import torch"


LIGHT = """
import echo2
import echo2.cli.app
import echo2.worker.shell, echo2.worker.program
import echo2.learner.shell, echo2.learner.program
import echo2.coordinator.program
import echo2.simulation.world
echo2.Run, echo2.train, echo2.Config
"""


def test_light_things_load_no_torch() -> None:
    """One process, looked at after each statement: starting seven would only take longer."""
    look = "found = [m for m in ('torch', 'transformers', 'matplotlib') if m in sys.modules]"
    lines = [f"{line}\n{look}\nassert not found, ({line!r}, found)" for line in LIGHT.split("\n") if line]
    code = "import sys\n" + "\n".join(lines)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=_environment(), check=False)
    assert done.returncode == 0, done.stderr


def test_the_public_names_are_what_all_says() -> None:
    import echo2

    for name in echo2.__all__:
        assert getattr(echo2, name) is not None
        assert name in dir(echo2)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = echo2.nothing


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(SOURCE.parent)}

"""Servers that the worker starts itself: begun, watched, replaced and ended, with nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_servers import Backend, FakeVllm, listening
from noted_events import NotedEvents
from tiny_models import TinyModel

from echo2.config.sections import ServerSection
from echo2.errors import EngineError
from echo2.rollout.engine import ActivationMode
from echo2.rollout.engines import build_engine
from echo2.rollout.engines.servers import guard
from echo2.rollout.engines.servers.engine import ServerEngine
from echo2.rollout.engines.servers.process import ServerProcess
from echo2.types import Policy, Sampling

pytestmark = pytest.mark.integration

PROGRAM = (sys.executable, str(Path(__file__).parents[3] / "support" / "stand_in_server.py"))
V0, V1 = Policy(0, 0), Policy(0, 1)
SAMPLING = Sampling(1.0, 1.0, 6, 3)


@pytest.fixture
def tiny(tmp_path: Path) -> TinyModel:
    return TinyModel("llama", tmp_path)


@asynccontextmanager
async def managed(
    tiny: TinyModel, *arguments: str, events: NotedEvents | None = None, **settings: Any
) -> AsyncIterator[ServerEngine]:
    server = ServerSection(command=PROGRAM, arguments=arguments, **{"start_timeout_s": 30.0, **settings})
    engine = build_engine(
        "vllm", tiny.folder, device="cpu", threads=1, dtype="float32", server=server, folder=tiny.folder / "engine",
        events=events or NotedEvents(),
    )  # fmt: skip
    assert isinstance(engine, ServerEngine)
    try:
        yield engine
    finally:
        await engine.close()


async def install(engine: ServerEngine, tiny: TinyModel, policy: Policy) -> None:
    await engine.prefetch(policy, tiny.snapshot(tiny.fresh(policy.version), policy))
    await engine.activate(policy)


def is_alive(pid: int) -> bool:
    try:
        return b" Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False


async def gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while is_alive(pid):
            await asyncio.sleep(0.05)


def pid_of(engine: ServerEngine) -> int:
    process = engine._serving._host._process  # type: ignore[attr-defined]
    assert isinstance(process, ServerProcess)
    return process.pid


async def test_an_install_without_a_weight_route_starts_the_server_anew_and_says_so(tiny: TinyModel) -> None:
    events = NotedEvents()
    async with managed(tiny, events=events) as engine:
        await install(engine, tiny, V0)
        assert engine.capabilities.restarts
        assert engine.capabilities.modes == {ActivationMode.DRAIN, ActivationMode.ABORT}
        first, old = pid_of(engine), await engine.generate([1, 2], SAMPLING, 3)
        await install(engine, tiny, V1)
        assert pid_of(engine) != first
        new = await engine.generate([1, 2], SAMPLING, 3)
    assert ("server_restarting", {
        "server": "vllm", "policy": "0.1", "why": "it takes no weights while it runs"}) in events.noted  # fmt: skip
    assert {c.policy_max for c in old} == {V0} and {c.policy_min for c in new} == {V1}
    assert {c.token_ids for c in old}.isdisjoint({c.token_ids for c in new})
    assert sorted(path.name for path in (tiny.folder / "engine" / "checkpoints").iterdir()) == ["0.1"]


async def test_a_server_that_dies_under_requests_is_started_again_with_the_installed_policy(tiny: TinyModel) -> None:
    events = NotedEvents()
    async with managed(tiny, "--dies-at", "2", str(tiny.folder / "died"), events=events) as engine:
        await install(engine, tiny, V0)
        group = await engine.generate([1, 2], SAMPLING, 4)
        again = await engine.generate([1, 2], SAMPLING, 4)
        assert engine.fault is None
    assert group == again  # the same seeds, whoever answered
    assert {c.policy_min for c in group} == {V0}
    assert [kind for kind in events.kinds if kind.startswith("server_")][-2:] == ["server_lost", "server_back"]


async def test_a_server_that_is_gone_is_a_fault_until_somebody_asks(tiny: TinyModel) -> None:
    async with managed(tiny) as engine:
        await install(engine, tiny, V0)
        os.killpg(pid_of(engine), signal.SIGKILL)
        await engine._serving._host._process.wait()  # type: ignore[attr-defined]
        assert engine.fault is not None and "it ended with exit code" in engine.fault
        assert engine.installed == V0
        assert len(await engine.generate([1, 2], SAMPLING, 2)) == 2
        assert engine.fault is None


async def test_a_server_that_dies_under_every_question_is_not_begun_for_ever(tiny: TinyModel) -> None:
    events = NotedEvents()
    async with managed(tiny, "--always-dies", str(tiny.folder / "spared"), events=events) as engine:
        (tiny.folder / "spared").touch()
        await install(engine, tiny, V0)
        (tiny.folder / "spared").unlink()
        for _ in range(3):
            with pytest.raises(EngineError):
                await engine.generate([1, 2], SAMPLING, 2)
        assert engine.fault is not None
        assert events.kinds.count("server_lost") == 3
        with pytest.raises(EngineError):
            await engine.mend()
        assert engine.fault is not None and engine.installed == V0
        (tiny.folder / "spared").touch()
        await engine.mend()
        assert engine.fault is None
        assert {c.policy_min for c in await engine.generate([1, 2], SAMPLING, 2)} == {V0}


async def test_a_server_that_had_the_port_first_is_not_taken_for_ours(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.fresh(9).save_pretrained(tiny.folder / "base")
    other = FakeVllm(Backend(), model="policy-0.0")
    other.backend.load(tiny.folder / "base")
    async with listening(other.application()) as url, managed(tiny) as engine:
        monkeypatch.setattr("echo2.rollout.engines.servers.host.free_port", lambda: int(url.rsplit(":", 1)[1]))
        await engine.prefetch(V0, tiny.snapshot(tiny.model, V0))
        with pytest.raises(EngineError, match=r"must serve policy-0\.0-.*; it serves policy-0\.0"):
            await engine.activate(V0)
        assert engine.installed is None and not other.backend.seen


async def test_a_port_that_is_taken_is_told_with_the_servers_last_words(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr("echo2.rollout.engines.servers.host.free_port", lambda: port)
        monkeypatch.setattr("echo2.rollout.engines.servers.host.HEALTH_S", 0.5)
        async with managed(tiny) as engine:
            await engine.prefetch(V0, tiny.snapshot(tiny.model, V0))
            with pytest.raises(EngineError, match=r"must start, it ended with exit code 1: OSError: .* address"):
                await engine.activate(V0)


async def test_nothing_is_left_of_a_server_that_was_closed(tiny: TinyModel) -> None:
    child = tiny.folder / "child"
    async with managed(tiny, "--child", str(child)) as engine:
        await install(engine, tiny, V0)
        pids = [pid_of(engine), int(child.read_text())]
        assert all(map(is_alive, pids))
    for pid in pids:
        await gone(pid)


async def test_nothing_is_left_when_the_worker_is_killed(tiny: TinyModel) -> None:
    child, log = tiny.folder / "child", tiny.folder / "log"
    worker = (
        "import subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-I', {guard.__file__!r}, *sys.argv[1:]], stdin=subprocess.PIPE,"
        " start_new_session=True)\n"
        "time.sleep(1000)\n"
    )
    engine_folder = tiny.snapshot(tiny.model, V0)
    arguments = [*PROGRAM, "--child", str(child), "--model", str(engine_folder), "--host", "127.0.0.1", "--port", "0",
                 "--served-model-name", "x"]  # fmt: skip
    with log.open("wb") as words:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", worker, *arguments, stderr=words)
    try:
        async with asyncio.timeout(20):
            while not child.exists() or not child.read_text():
                await asyncio.sleep(0.05)
        mine = [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/cmdline") if _names(path, child)]
        assert len(mine) == 3  # the worker, the guard, the server
    finally:
        process.kill()
        await process.wait()
    for pid in [*mine, int(child.read_text())]:
        await gone(pid)


def _names(command_line: Path, argument: Path) -> bool:
    try:
        return str(argument).encode() in command_line.read_bytes().split(b"\0")
    except OSError:
        return False


async def test_a_server_that_does_not_start_is_told_with_its_last_words(tiny: TinyModel) -> None:
    async with managed(tiny, "--fails", "no such device") as engine:
        await engine.prefetch(V0, tiny.snapshot(tiny.model, V0))
        with pytest.raises(EngineError, match=r"must start, it ended with exit code 3: ValueError: no such device"):
            await engine.activate(V0)
        assert engine.installed is None


async def test_a_server_that_is_never_ready_is_ended_in_time(tiny: TinyModel) -> None:
    async with managed(tiny, "--hangs", start_timeout_s=1.0) as engine:
        await engine.prefetch(V0, tiny.snapshot(tiny.model, V0))
        with pytest.raises(EngineError, match=r"ready within server\.start_timeout_s = 1 s"):
            await engine.activate(V0)


async def test_a_program_that_is_not_there_is_told(tiny: TinyModel) -> None:
    server = ServerSection(command=("/nowhere/vllm",), start_timeout_s=20.0)
    engine = build_engine(
        "vllm", tiny.folder, device="cpu", threads=0, dtype="float32", server=server, folder=tiny.folder / "engine",
        events=NotedEvents(),
    )  # fmt: skip
    await engine.prefetch(V0, tiny.snapshot(tiny.model, V0))
    with pytest.raises(EngineError, match="guard: cannot start /nowhere/vllm"):
        await engine.activate(V0)
    await engine.close()

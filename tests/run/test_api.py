from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import echo2
from echo2.config.load import build_config
from echo2.config.root import Config
from echo2.errors import ConfigError, UserError
from echo2.metrics import StepMetrics
from echo2.run import api, child, launch
from echo2.run.child import ChildSpec
from echo2.run.folder import RunFolder
from echo2.run.launch import RunSpecs

PROGRAM = (sys.executable, str(Path(__file__).with_name("programs.py")))


class Silent:
    def emit(self, kind: str, **fields: object) -> None:
        pass


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A run whose programs are stand-ins that live until they are told to stop."""
    monkeypatch.setattr(child, "RESTART_FIRST_S", 0.01)
    monkeypatch.setattr(launch, "TERM_LIMIT_S", 0.5)
    monkeypatch.setattr(launch, "POLL_S", 0.01)
    monkeypatch.setattr(api, "LOOK_S", 0.01)

    def specs_of(config: Config, folder: RunFolder) -> RunSpecs:
        def spec(name: str, *, restartable: bool = True) -> ChildSpec:
            if not (folder.root / f"plan-{name}").exists():
                (folder.root / f"plan-{name}").write_text("until-stop")
            log = folder.log(name)
            return ChildSpec(name, (str(folder.root), name), log, program=PROGRAM, restartable=restartable)

        return RunSpecs(spec("coordinator", restartable=False), spec("learner"), (spec("w0"),))

    async def tell_stop(self: object, reason: str) -> None:
        RunFolder(tmp_path / "r").root.joinpath("stop").touch()

    monkeypatch.setattr(api, "specs_of", specs_of)
    monkeypatch.setattr("echo2.run.operator.OperatorLine.stop", tell_stop)
    return build_config({"run": {"dir": str(tmp_path), "name": "r"}, "rollout": {"engine": "scripted"}})


def append(folder: RunFolder, step: int) -> None:
    known: dict[str, Any] = {"step": step, "reward_mean": step / 10}
    fields = {f.name: {} if "dict" in str(f.type) else 0 for f in msgspec.structs.fields(StepMetrics)}
    with folder.metrics.open("ab") as file:
        file.write(msgspec.json.encode(fields | known) + b"\n")


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_steps_are_iterated_as_they_come_and_the_run_can_be_stopped(config: Config) -> None:
    with echo2.Run(config, events=Silent()) as run:
        seen = []
        append(run.folder, 0)
        for metrics in run:
            seen.append(metrics.step)
            if metrics.step == 3:
                run.stop("good enough")
            elif metrics.step < 3:
                append(run.folder, metrics.step + 1)
        result = run.result()
    assert seen == [0, 1, 2, 3]
    assert result.stopped == "good enough"
    assert [line.step for line in result.metrics] == seen
    assert result.reward_mean == pytest.approx(0.15)
    assert result.folder == run.folder.root


def test_leaving_the_block_ends_every_program(config: Config) -> None:
    with echo2.Run(config, events=Silent()) as run:
        wait_for(lambda: len(list(run.folder.root.glob("lives-*"))) == 3)
    for path in run.folder.root.glob("lives-*"):
        for pid in map(int, path.read_text().split()):
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
    assert run.is_over


def test_a_failure_of_the_caller_ends_the_run_and_is_passed_on(config: Config) -> None:
    run = echo2.Run(config, events=Silent())

    def fail() -> None:
        with run:
            wait_for(lambda: run.folder.coordinator.exists())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert run.is_over


def test_sigterm_inside_the_block_ends_the_run_in_order(config: Config) -> None:
    def terminate() -> None:
        wait_for(lambda: (RunFolder.of(config).root / "lives-w0").exists())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    killer = threading.Thread(target=terminate)
    killer.start()
    with pytest.raises(KeyboardInterrupt), echo2.Run(config, events=Silent()) as run:
        run.result()
    killer.join()
    assert run.is_over
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_users_mistake_that_a_program_finds_is_raised_as_one(config: Config) -> None:
    folder = RunFolder.of(config)
    folder.prepare(config, resume=False)
    (folder.root / "plan-learner").write_text("user-error")
    with pytest.raises(UserError, match=r"learning\.lr must be more than 0"):
        echo2.train(config, resume=True, events=Silent())


def test_a_run_folder_is_not_used_twice_without_asking(config: Config) -> None:
    RunFolder.of(config).prepare(config, resume=False)
    with pytest.raises(UserError, match="continue it with --resume"):
        echo2.train(config, events=Silent())


def test_status_needs_a_running_run(config: Config) -> None:
    with pytest.raises(UserError, match="the run must be running"):
        echo2.Run(config, events=Silent()).status()


def test_configurations_come_as_path_tables_or_ready(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[run]\nname = "x"\n[rollout]\nengine = "scripted"\n')
    tables = {"run": {"name": "x"}, "rollout": {"engine": "scripted"}}
    ready = build_config(tables)
    assert api.as_config(path) == api.as_config(str(path)) == api.as_config(tables) == api.as_config(ready) == ready
    with pytest.raises(ConfigError, match="unknown key `lrr`"):
        api.as_config({"learning": {"lrr": 1.0}, "rollout": {"engine": "scripted"}})

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from echo2.cli.app import app
from echo2.cli.boundary import run


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """Standard output, which must be one JSON object on one line and nothing else."""
        assert self.out.count("\n") == 1, self.out
        return json.loads(self.out)

    @property
    def faults(self) -> list[str]:
        """The sentences on standard error, which must hold nothing else."""
        lines = self.err.splitlines()
        assert all(line.startswith("echo2: ") for line in lines), self.err
        return [line.removeprefix("echo2: ") for line in lines]


Echo2 = Callable[..., Outcome]


@pytest.fixture
def echo2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Echo2:
    """Run the command line inside this process."""
    monkeypatch.delenv("ECHO2_JOIN", raising=False)
    monkeypatch.delenv("ECHO2_DEBUG", raising=False)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run(app, [str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call

"""The check for a GPU runs, with the same code, where there is none."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch

from bench import gpu_step


def printed(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> dict[str, object]:
    monkeypatch.setattr(sys, "argv", ["gpu_step", *arguments])
    gpu_step.main()
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_tiny_model_is_measured_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = "--cpu --layers 2 --hidden 64 --vocabulary 512 --groups 2 --n 3 --prompt 12 --longest 40 --budget 128"
    found = printed([*arguments.split(), "--repeat", "1", "--new-tokens", "4"], monkeypatch, capsys)
    assert found["device"] == "cpu"
    for shape in ("0.6b", "4b"):
        figures = found[shape]
        assert figures["shares_prefixes"] is True
        assert 0 < figures["step"]["mfu"] < 1
        assert figures["step"]["trainable_tokens"] > 40
        assert figures["snapshot_gb"] > 0
    assert found["0.6b"]["generate"]["tokens"] > 0


def test_without_a_gpu_it_says_so_and_ends_in_order(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no GPU is present" in str(printed([], monkeypatch, capsys)["skipped"])

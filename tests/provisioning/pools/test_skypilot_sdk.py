from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from scripted_sky import ClusterDoesNotExist, stand_in

from echo2.errors import Echo2Error, Refused, TransportError, Unauthorised, UserError
from echo2.provisioning.pools.skypilot_sdk import MOST_CALLS, Order, Sdk, is_gone, told

ORDER = Order(
    cluster="e2abcdef-0123456789",
    machine_id="gcp-a2-1",
    infra="gcp/us-x1",
    instance_type="a2-highgpu-1g",
    accelerator="A100",
    accelerators=1,
    use_spot=False,
    image="",
    disk_gb=0,
    labels={},
    run="exec echo2 worker --name gcp-a2-1",
    idle_minutes=5,
)


def test_without_skypilot_a_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"install echo2\[skypilot\]"):
        Sdk()


def test_the_command_line_does_not_load_skypilot() -> None:
    code = "import sys, echo2.cli.app, echo2.provisioning.pools.skypilot; assert 'sky' not in sys.modules"
    source = Path(__file__).parents[3] / "src"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(source)}, check=False
    )
    assert done.returncode == 0, done.stderr


class ApiServerConnectionError(RuntimeError):
    """By the name of SkyPilot's own."""


class PermissionDeniedError(Exception):
    """By the name of SkyPilot's own."""


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ApiServerConnectionError("down"), TransportError),
        (ConnectionError("no route"), TransportError),
        (TimeoutError("read timed out"), TransportError),
        (PermissionDeniedError("not yours"), Unauthorised),
        (RuntimeError("failed"), Refused),
        (ClusterDoesNotExist("none"), Refused),
        (SystemExit(1), Refused),
    ],
)
def test_errors_are_worth_another_try_or_not(error: BaseException, kind: type[Echo2Error]) -> None:
    assert type(told(error)) is kind


def test_errors_are_one_short_line_without_colours_or_secrets() -> None:
    sentence = str(told(ValueError("\x1b[31mno\x1b[0m:\n  echo2://token@10.0.0.1:8400?tls=1\n\n" + "x" * 1000)))
    assert sentence.startswith("SkyPilot: no: echo2://…@10.0.0.1:8400?tls=1 xxx")
    assert sentence.endswith("x… (ValueError)")
    assert len(sentence) < 540
    assert str(told(ValueError(""))) == "SkyPilot: no reason given (ValueError)"


def test_a_cluster_that_is_not_there_is_told_from_other_refusals() -> None:
    assert is_gone(told(ClusterDoesNotExist("Cluster 'a' does not exist.")))  # type: ignore[arg-type]
    assert not is_gone(Refused("SkyPilot: ClusterDoesNotExist is a word in here (RuntimeError)"))


async def test_a_server_that_answers_nobody_holds_a_few_threads_and_keeps_no_program_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = stand_in(monkeypatch)
    server.gate.clear()
    sdk = Sdk()
    calls = [sdk.launch(ORDER, "echo2://token@10.0.0.1:8400") for _ in range(MOST_CALLS)]
    with pytest.raises(TransportError, match=f"left {MOST_CALLS} calls unanswered"):
        await sdk.down("e2abcdef-0123456789")
    assert all(thread.daemon for thread in threading.enumerate() if thread.name == "skypilot")
    server.gate.set()
    await asyncio.gather(*calls)
    assert await sdk.down("e2abcdef-0123456789")


async def test_tracebacks_of_the_program_are_left_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in(monkeypatch)
    sdk = Sdk()

    def silence(cluster_name: str) -> str:
        sys.tracebacklimit = 0  # as SkyPilot does
        raise RuntimeError(cluster_name)

    monkeypatch.setattr(sys.modules["sky"], "down", silence)
    with pytest.raises(Refused):
        await sdk.down("a")
    assert not hasattr(sys, "tracebacklimit")
    assert server.launched == []


async def test_a_result_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = stand_in(monkeypatch)
    sdk = Sdk()
    request_id = await sdk.launch(ORDER, "echo2://token@10.0.0.1:8400")
    waiting = asyncio.create_task(sdk.result(request_id))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    server.land(ORDER.cluster)
    await waiting
    (launched,) = server.launched
    assert launched.task.secrets == {"ECHO2_JOIN": "echo2://token@10.0.0.1:8400"}

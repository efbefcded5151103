"""A SkyPilot API server that does as it is told, behind the functions of the SDK that reach one.

``stand_in`` is a whole package ``sky`` for environments without SkyPilot; ``real_server`` puts the same functions into
the real one, whose types then are used for everything else.
"""

from __future__ import annotations

import atexit
import enum
import functools
import importlib.util
import shutil
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

CALLS = ("launch", "down", "status", "api_status", "api_cancel", "get", "list_accelerators")


class ClusterDoesNotExist(ValueError):
    pass


class ScriptedSky:
    """Launches go on until ``land`` or ``fail``; everything else is done at once."""

    def __init__(
        self, record: Callable[..., Any], payload: Callable[..., Any], absent: type[Exception] = ClusterDoesNotExist
    ) -> None:
        self._record, self._payload, self._absent = record, payload, absent
        self.clusters: dict[str, dict[str, Any]] = {}
        self.requests: dict[str, SimpleNamespace] = {}
        self.launched: list[SimpleNamespace] = []
        self.asked_clouds: list[tuple[str, ...]] = []
        self.fetched: list[list[str]] = []
        self.errors: dict[str, BaseException] = {}
        """By function: what the next call of it raises."""
        self.gate = threading.Event()
        """Launches reach the server once it is set."""
        self.gate.set()
        self.knocked = threading.Event()
        """A launch stands before it."""
        self.on_fetch: Callable[[], None] = lambda: None
        self.silent_clouds = False
        """Requests that ask clouds are not answered."""
        self.waited_for_clouds = threading.Event()
        """Somebody asked whether such a request is done."""

    def patch(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        for name in CALLS:
            monkeypatch.setattr(module, name, getattr(self, name))

    # ---- what tests do -------------------------------------------------------------------------------------------

    def land(self, name: str, **changes: Any) -> None:
        self._end(name, None)
        self.clusters[name] |= {"status": "UP", "cluster_ever_up": True, "init_kind": None, **changes}

    def fail(self, name: str, error: BaseException, *, leaves: dict[str, Any] | None = None) -> None:
        """``leaves``: what remains of the cluster."""
        self._end(name, error)
        if leaves is None:
            del self.clusters[name]
        else:
            self.clusters[name] |= leaves

    def answer_clouds(self) -> None:
        self.silent_clouds = False
        for request in self.requests.values():
            if request.kind == "status" and request.status == "RUNNING":
                request.status = "SUCCEEDED"

    def _end(self, name: str, error: BaseException | None) -> None:
        for request in self.requests.values():
            if (request.kind, request.cluster, request.status) == ("launch", name, "RUNNING"):
                request.status, request.error = ("FAILED" if error else "SUCCEEDED"), error

    # ---- the SDK's functions -------------------------------------------------------------------------------------

    def launch(self, task: Any, *, cluster_name: str, **options: Any) -> str:
        self.knocked.set()
        self.gate.wait(10)
        self._raise("launch")
        self.launched.append(SimpleNamespace(task=task, cluster=cluster_name, **options))
        (resources,) = task.resources
        self.clusters[cluster_name] = {"status": "INIT", "init_kind": "launching", "labels": resources.labels}
        return self._request("launch", cluster_name, "RUNNING")

    def down(self, cluster_name: str) -> str:
        self._raise("down")
        if self.clusters.pop(cluster_name, None) is None:
            error = self._absent(f"Cluster '{cluster_name}' does not exist.")
            return self._request("down", cluster_name, "FAILED", error=error)
        return self._request("down", cluster_name, "SUCCEEDED")

    def status(self, cluster_names: list[str] | None, *, refresh: Any, all_users: bool) -> str:
        self._raise("status")
        assert all_users, "a coordinator that moved to another machine is another user"
        names = sorted(self.clusters) if cluster_names is None else [n for n in cluster_names if n in self.clusters]
        state = "SUCCEEDED"
        if refresh.value != "NONE":
            self.asked_clouds.append(tuple(cluster_names or ()))
            state = "RUNNING" if self.silent_clouds else state
        return self._request("status", None, state, value=[self._of(name) for name in names])

    def api_status(self, *, fields: list[str]) -> list[Any]:
        self._raise("api_status")
        assert "request_body" not in fields, "bodies of requests hold join strings"
        if any((request.kind, request.status) == ("status", "RUNNING") for request in self.requests.values()):
            self.waited_for_clouds.set()
        return [
            self._payload(
                request_id=request_id, name=f"sky.{request.kind}", cluster_name=request.cluster, status=request.status
            )
            for request_id, request in self.requests.items()
            if request.status == "RUNNING"
        ]

    def api_cancel(self, request_ids: list[str], *, silent: bool) -> str:
        for request_id in request_ids:
            self.requests[request_id].status = "CANCELLED"
        return self._request("api_cancel", None, "SUCCEEDED", value=request_ids)

    def get(self, request_id: str) -> Any:
        request = self.requests[request_id]
        if request.error is not None:
            raise request.error
        return request.value

    def list_accelerators(self, *, name_filter: str, clouds: list[str]) -> str:
        self._raise("list_accelerators")
        self.fetched.append(clouds)
        self.on_fetch()
        return self._request("list_accelerators", None, "SUCCEEDED", value={})

    def _of(self, name: str) -> Any:
        empty = ("init_kind", "init_status_reason", "last_event", "handle")
        fields = {"cluster_ever_up": False, **dict.fromkeys(empty)}
        return self._record(name=name, **{**fields, **self.clusters[name]})

    def _request(
        self, kind: str, cluster: str | None, status: str, *, value: Any = None, error: BaseException | None = None
    ) -> str:
        request_id = f"request-{len(self.requests)}"
        self.requests[request_id] = SimpleNamespace(kind=kind, cluster=cluster, status=status, value=value, error=error)
        return request_id

    def _raise(self, function: str) -> None:
        if function in self.errors:
            raise self.errors.pop(function)


class StatusRefreshMode(enum.Enum):
    NONE = "NONE"
    AUTO = "AUTO"


class AutostopWaitFor(enum.Enum):
    JOBS = "jobs"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> ScriptedSky:
    """For the time of a test, ``import sky`` finds a package with nothing behind it but the scripted server."""

    def record(*, status: str, **fields: Any) -> Any:
        return SimpleNamespace(status=SimpleNamespace(value=status), **fields)

    server = ScriptedSky(record, SimpleNamespace)
    package = _module("sky", **{name: getattr(server, name) for name in CALLS}, StatusRefreshMode=StatusRefreshMode)
    package.Task = lambda *, resources, **fields: SimpleNamespace(resources={resources}, **fields)  # type: ignore[attr-defined]
    package.Resources = _Resources  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sky", package)
    monkeypatch.setitem(sys.modules, "sky.skylet", _module("sky.skylet"))
    autostop = _module("sky.skylet.autostop_lib", AutostopWaitFor=AutostopWaitFor)
    monkeypatch.setitem(sys.modules, "sky.skylet.autostop_lib", autostop)
    return server


class _Resources:
    def __init__(self, **fields: Any) -> None:
        self.__dict__.update(fields)


def _module(name: str, **content: Any) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__dict__.update(content)
    return module


CATALOGS = {
    "common/accelerators.csv": "AcceleratorName,Clouds\nA100,\"['GCP']\"\nRTX5090,\"['Vast']\"\n",
    "gcp/vms.csv": (
        "InstanceType,vCPUs,MemoryGiB,AcceleratorName,AcceleratorCount,GpuInfo,Region,AvailabilityZone,Price,SpotPrice\n"
        "a2-highgpu-1g,12.0,85.0,,,,us-x1,us-x1-a,0.7,0.3\n"
        ",,,A100,1,A100,us-x1,us-x1-a,2.9,0.9\n"
        "a2-highgpu-1g,12.0,85.0,,,,us-x1,us-x1-b,0.8,0.4\n"
        ",,,A100,1,A100,us-x1,us-x1-b,3.2,1.0\n"
    ),
    "vast/vms.csv": (
        "InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region\n"
        "1x-5090,RTX5090,1,32,64.0,\"{'Gpus': [], 'TotalGpuMemoryInMiB': 32607}\",0.50,0.00,\"Utah, US, NA\"\n"
    ),
}
"""Made up, in the shape of SkyPilot's."""


def write_catalogs(folder: Path) -> Path:
    for name, text in CATALOGS.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@functools.cache
def real_sky() -> Any:
    """The package itself, which finds made-up catalogs and no home; skips where it is not installed."""
    if importlib.util.find_spec("sky") is None:
        pytest.skip("needs the extra skypilot: SkyPilot's own types are not installed")
    home = Path(tempfile.mkdtemp(prefix="echo2-sky-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    write_catalogs(home / ".sky" / "catalogs" / "v8")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HOME", str(home))
        patch.setenv("SKY_RUNTIME_DIR", str(home))
        import sky
        import sky.utils.accelerator_registry
        from sky.schemas.api import responses
        from sky.server.requests import payloads

        _ = responses, payloads
    return sky


def real_server(monkeypatch: pytest.MonkeyPatch) -> ScriptedSky:
    """The scripted server behind the real package: its tasks, resources, records and errors."""
    sky = real_sky()
    from sky.schemas.api.responses import StatusResponse
    from sky.server.requests.payloads import RequestPayload

    def record(*, status: str, **fields: Any) -> Any:
        return StatusResponse(
            status=sky.ClusterStatus(status),
            launched_at=0,
            autostop=5,
            to_down=True,
            cluster_hash="hash",
            user_hash="user",
            user_name="user",
            workspace="default",
            is_managed=False,
            nodes=1,
            **fields,
        )

    def payload(**fields: Any) -> Any:
        blank = dict.fromkeys(("entrypoint", "user_id"), "") | dict.fromkeys(
            ("request_body", "return_value", "error"), "null"
        )
        return RequestPayload(created_at=0.0, pid=None, schedule_type="long", **blank, **fields)

    server = ScriptedSky(record, payload, sky.exceptions.ClusterDoesNotExist)
    server.patch(monkeypatch, sky)
    return server

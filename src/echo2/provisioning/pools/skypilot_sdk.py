"""The only place that speaks to SkyPilot: its SDK, which blocks, called from threads.

Invariant: no call here waits for a machine. Each sends a request to SkyPilot's API server, which carries it out by
itself; whether that is done is asked again and again (``Sdk.result``). So a caller that gives up leaves no thread
behind, and a server that answers nobody holds at most ``MOST_CALLS`` of them, which keep no program from ending.

Join strings travel as a task's secret, in the body of one request. They are never part of a command, and are cut out of
every error.

Written against skypilot 0.14.1 (``sky/client/sdk.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from echo2.errors import Echo2Error, Refused, TransportError, Unauthorised, UserError
from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.pools.skypilot_clusters import Sighting
from echo2.transport.join import ENVIRONMENT_KEY

MOST_CALLS = 8
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 3.0
_MOST_CHARACTERS = 500
"""Of an error: SkyPilot's may hold tables."""
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_TOKEN = re.compile(r"echo2://[^@\s]*@")
LAUNCH = "launch"
_PREFIX = "sky."
"""The API server puts it before the names of requests."""
_GONE = "ClusterDoesNotExist"

_AWAY = (
    "ApiServerConnectionError", "ServerTemporarilyUnavailableError", "RequestInterruptedError", "NetworkError",
    "ClusterStatusFetchingError", "FetchClusterInfoError", "KubeAPIUnreachableError", "ExecutionPoolFullError",
    "ConcurrentWorkerExhaustedError", "ExecutionRetryableError",
)  # fmt: skip
"""Of ``sky.exceptions``: worth another try."""
_BARRED = ("ApiServerAuthenticationError", "PermissionDeniedError", "ClusterOwnerIdentityMismatchError")
_IMPORTING = threading.Lock()

T = TypeVar("T")


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """A machine to launch, in SkyPilot's words."""

    cluster: str
    machine_id: str
    infra: str
    instance_type: str
    accelerator: str
    accelerators: int
    use_spot: bool
    image: str
    disk_gb: int
    labels: dict[str, str]
    run: str
    """Shell commands of the task; they find the join string in the environment."""
    idle_minutes: int


class Open(msgspec.Struct, frozen=True):
    """A request that the API server has not finished."""

    request_id: str
    kind: str
    """``launch``, ``down``, …"""
    cluster: str

    def makes(self, cluster: str) -> bool:
        return self.kind == LAUNCH and self.cluster == cluster


def require() -> None:
    """Raises UserError where SkyPilot is not installed."""
    if importlib.util.find_spec("sky") is None:
        raise UserError(
            "renting through SkyPilot needs the package skypilot, which is not installed beside echo2: "
            "install echo2[skypilot]"
        )


def told(error: BaseException) -> Echo2Error:
    """One of ours: a TransportError when another try may help, else Refused, without anything secret."""
    names = {kind.__name__ for kind in type(error).__mro__}
    lines = [line.strip() for line in _ANSI.sub("", _TOKEN.sub("echo2://…@", str(error))).splitlines()]
    text = " ".join(line for line in lines if line)
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    sentence = f"SkyPilot: {short or 'no reason given'} ({type(error).__name__})"
    if names & set(_BARRED):
        return Unauthorised(sentence)
    # Of the standard library's, OSError stands for the connection; requests' own errors derive from it.
    if names & {*_AWAY, "OSError"}:
        return TransportError(sentence)
    return Refused(sentence)


def is_gone(error: Refused) -> bool:
    """It was refused because there is no such cluster."""
    return str(error).endswith(f"({_GONE})")


class Sdk:
    """SkyPilot's API server as its client in this environment is configured to reach it.

    Without configuration the first call starts a server on this machine. All methods raise TransportError and Refused.
    """

    def __init__(self) -> None:
        require()
        self._busy = 0
        self._traceback_limit: int | None = getattr(sys, "tracebacklimit", None)

    # ---- requests that are carried out later: each returns the request's id --------------------------------------

    def launch(self, order: Order, join: str) -> asyncio.Future[str]:
        """In the hands of a thread when this returns; the future may be abandoned and looked at later."""
        return self._begin(lambda: _launch(order, join))

    async def down(self, cluster: str) -> str:
        return await self._call(lambda: _sky().down(cluster))

    async def status(self, clusters: Sequence[str] | None, *, ask_clouds: bool) -> str:
        """Of the named ones, or of all that the server knows. ``ask_clouds``: whether they are still there."""

        def ask() -> Any:
            sky = _sky()
            mode = sky.StatusRefreshMode.AUTO if ask_clouds else sky.StatusRefreshMode.NONE
            return sky.status(None if clusters is None else list(clusters), refresh=mode, all_users=True)

        return await self._call(ask)

    async def fetch_catalog(self, cloud: str, gpu: str) -> str:
        """Has the server read its catalog of ``cloud``, which downloads it again where it is old."""
        return await self._call(lambda: _sky().list_accelerators(name_filter=re.escape(gpu), clouds=[cloud]))

    async def cancel(self, request_ids: Iterable[str]) -> str:
        ids = list(request_ids)
        return await self._call(lambda: _sky().api_cancel(ids, silent=True))

    # ---- requests under way ---------------------------------------------------------------------------------------

    async def unfinished(self) -> tuple[Open, ...]:
        fields = ["request_id", "name", "cluster_name", "status"]
        found = await self._call(lambda: _sky().api_status(fields=fields))
        return tuple(
            Open(request.request_id, request.name.removeprefix(_PREFIX), request.cluster_name or "")
            for request in found
        )

    async def result(self, request_id: str, read: Callable[[Any], T] = lambda value: value) -> T:
        """Waits until it is done. Raises what SkyPilot raised, as one of ours. ``read`` runs in a thread."""
        pause_s = _FIRST_PAUSE_S
        while any(request.request_id == request_id for request in await self.unfinished()):
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return await self._call(lambda: read(_sky().get(request_id)))

    async def sighted(self, request_id: str) -> tuple[Sighting, ...]:
        """The result of a ``status``."""
        return await self.result(request_id, lambda records: tuple(map(_sighting, records)))

    # ---- threads --------------------------------------------------------------------------------------------------

    async def _call(self, function: Callable[[], T]) -> T:
        return await self._begin(function)

    def _begin(self, function: Callable[[], T]) -> asyncio.Future[T]:
        if self._busy >= MOST_CALLS:
            raise TransportError(f"SkyPilot's API server has left {MOST_CALLS} calls unanswered")
        self._busy += 1
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: Echo2Error | None) -> None:
            self._busy -= 1
            if future.done():
                return  # the caller gave up
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(value)  # type: ignore[arg-type]  # a T where there is no error

        def work() -> None:
            value, error = None, None
            try:
                value = function()
            except Echo2Error as ours:
                error = ours
            except BaseException as theirs:  # of any kind, SystemExit among them: it belongs to the caller
                error = told(theirs)
            self._show_tracebacks()
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(settle, value, error)

        threading.Thread(target=work, name="skypilot", daemon=True).start()
        return future

    def _show_tracebacks(self) -> None:
        """SkyPilot turns them off for the whole program when it raises, and leaves them so (``sky.utils.ux_utils``)."""
        if self._traceback_limit is None:
            sys.__dict__.pop("tracebacklimit", None)
        else:
            sys.tracebacklimit = self._traceback_limit


def task(order: Order, join: str) -> Any:
    """``sky.Task`` of one worker."""
    sky = _sky()
    resources = sky.Resources(
        infra=order.infra,
        instance_type=order.instance_type,
        accelerators={order.accelerator: order.accelerators},
        use_spot=order.use_spot,
        disk_size=order.disk_gb or None,
        image_id=order.image or None,
        labels=order.labels,
    )
    # A rented machine must not be able to rent others: no access to the API server.
    return sky.Task(
        name=order.machine_id,
        run=order.run,
        secrets={ENVIRONMENT_KEY: join},
        resources=resources,
        api_server_access=False,
    )


def _launch(order: Order, join: str) -> Any:
    from sky.skylet.autostop_lib import AutostopWaitFor

    return _sky().launch(
        task(order, join),
        cluster_name=order.cluster,
        idle_minutes_to_autostop=order.idle_minutes,
        down=True,
        wait_for=AutostopWaitFor.JOBS,  # a forgotten shell on the machine must not keep it
    )


def _sighting(record: Any) -> Sighting:
    """From ``sky.schemas.api.responses.StatusResponse``."""
    return Sighting(
        name=record.name,
        status=record.status.value,
        unhealthy=record.init_kind == "unhealthy",
        was_up=record.cluster_ever_up,
        detail=_ANSI.sub("", record.init_status_reason or record.last_event or ""),
        labels=dict(record.labels or {}),
        usd_per_h=_price(record.handle),
    )


def _price(handle: Any) -> float | None:
    """Of the zone in which it runs, which may be a dearer one than the cheapest of its region; None: not known."""
    resources = getattr(handle, "launched_resources", None)
    if resources is None:
        return None
    try:
        usd_per_h = float(resources.get_cost(SECONDS_PER_H))
    except Exception:  # no catalog here, or one without this machine: a price is missing, and nothing else
        return None
    return usd_per_h if 0 < usd_per_h < math.inf else None


def _sky() -> Any:
    """Imported by the first thread that needs it: it takes seconds, and gives the root logger a handler of its own."""
    require()
    root = logging.getLogger()
    with _IMPORTING:
        fresh, handlers, level = "sky" not in sys.modules, list(root.handlers), root.level
        import sky

        if fresh:
            root.handlers[:] = handlers
            root.setLevel(level)
    return sky

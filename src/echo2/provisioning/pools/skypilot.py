"""Machines rented through SkyPilot: each one a cluster of one node that runs one worker.

Invariants:
- A machine is launched once. Its cluster is named after it, so a start that finds the cluster, or a launch of it under
  way, adopts that; a second launch would put a second worker on it.
- A stop leaves neither a cluster nor a launch that could still make one: launches are cancelled first, then what they
  made is taken down, then SkyPilot is asked whether it is gone.
- A machine whose worker ended takes itself down after ``WorkerPlan.idle_minutes``, whether or not a coordinator is left
  to ask for it.
- A handle's price is that of the zone the machine runs in, by SkyPilot's catalog of now; until that is known, that of
  the row that was ordered.

What the API server is asked for in ``machines`` goes on there when the caller's deadline passes; the next call looks at
the same request again.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import msgspec

from echo2.errors import Refused, TransportError, UserError
from echo2.ports import Clock
from echo2.provisioning.estimate import Workload
from echo2.provisioning.observation import Listing, Phase, Price
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.pool import Handle
from echo2.provisioning.pools.skypilot_clusters import (
    UP,
    Known,
    Sighting,
    adopted,
    check_machine_id,
    cluster_name,
    handles,
    machine_of,
    prefix,
)
from echo2.provisioning.pools.skypilot_market import Rentable, Rental, rentals
from echo2.provisioning.pools.skypilot_sdk import LAUNCH, Open, Sdk, is_gone
from echo2.provisioning.pools.skypilot_worker import WorkerPlan, order
from echo2.provisioning.prices.skypilot_files import CatalogFiles

CATALOG = Path("~/.sky/catalogs/v8")
"""Where SkyPilot keeps its catalog, in the schema that ``prices.skypilot`` reads."""
REFRESH_S = 3600.0
"""A catalog whose prices are older is asked for anew; SkyPilot downloads its files every seven hours at most."""
ASK_AGAIN_S = 600.0


class SkyPilotPool:
    """``pools.pool.Pool`` over SkyPilot's API server."""

    name = "skypilot"

    def __init__(
        self,
        run_id: str,
        wanted: Sequence[Rentable],
        plan: WorkerPlan,
        invite: Invite,
        clock: Clock,
        *,
        catalog: Path = CATALOG,
        workload: Workload | None = None,
    ) -> None:
        """Raises UserError where SkyPilot is not installed, or a throughput is neither given nor can be estimated."""
        for entry in wanted:
            if entry.rollouts_per_s is None and workload is None:
                raise UserError(
                    f"machines of {entry.cloud} must have rollouts_per_s, or a workload to estimate it from"
                )
        self._run_id, self._wanted, self._plan, self._workload = run_id, tuple(wanted), plan, workload
        self._invite, self._clock = invite, clock
        self._sdk = Sdk()
        self._files = CatalogFiles(catalog.expanduser())
        self._asked_s: dict[str, float] = {}
        """By cloud, when the server was last asked to read its catalog."""
        self._rentals: dict[str, Rental] = {}
        self._known: dict[str, Known] = {}
        """By machine, from its order until it is stopped."""
        self._launches: dict[str, asyncio.Future[str]] = {}
        """By machine: the id of its launch, until that is over."""
        self._starting: dict[str, asyncio.Lock] = {}
        self._downs: dict[str, str] = {}
        """By cluster: the request that takes it down."""
        self._stopped: set[str] = set()
        """Clusters that are gone, and are not adopted from an answer that is older than that."""
        self._look: tuple[str, frozenset[str]] | None = None
        """A request for what clouds say of the named clusters, which is not answered yet."""

    # ---- offers ---------------------------------------------------------------------------------------------------

    async def listings(self) -> Sequence[Listing]:
        found: dict[str, Listing] = {}
        for cloud in sorted({entry.cloud for entry in self._wanted}):
            try:
                await self._freshen(cloud)
                prices = await asyncio.to_thread(self._files.prices, cloud)
                of_cloud = rentals(prices.quotes, self._wanted, self._workload)
            except UserError as error:  # a file that is no catalog, a GPU whose throughput cannot be estimated
                raise Refused(str(error)) from None
            self._rentals |= of_cloud
            at_s = self._clock.monotonic() - max(0.0, self._clock.wall() - prices.fetched_s)
            for name, rental in of_cloud.items():
                found[name] = Listing(rental.offer, (Price(rental.quote.usd_per_h, at_s),))
        return [found[name] for name in sorted(found)]

    async def _freshen(self, cloud: str) -> None:
        """Have SkyPilot fetch the catalog anew where it is old. Raises Refused when there is none afterwards."""
        if self._files.has(cloud):
            prices = await asyncio.to_thread(self._files.prices, cloud)
            if self._clock.wall() - prices.fetched_s < REFRESH_S:
                return
        now_s = self._clock.monotonic()
        if now_s - self._asked_s.get(cloud, -math.inf) >= ASK_AGAIN_S:
            self._asked_s[cloud] = now_s
            gpu = next(entry.gpu for entry in self._wanted if entry.cloud == cloud)
            try:
                await self._sdk.result(await self._sdk.fetch_catalog(cloud, gpu))
            except (Refused, TransportError):
                if not self._files.has(cloud):
                    raise
        if not self._files.has(cloud):
            raise Refused(
                f"SkyPilot's catalog of {cloud} must lie in {self._files.folder}, and it does not: where the API "
                "server is on another machine, copy the folder from there"
            )

    # ---- start ----------------------------------------------------------------------------------------------------

    async def start(self, machine_id: str, offer: str) -> Handle:
        check_machine_id(machine_id)
        async with self._starting.setdefault(machine_id, asyncio.Lock()):
            if machine_id not in self._known and not await self._adopt(machine_id, offer):
                await self._order(machine_id, offer)
            if (launch := self._launches.get(machine_id)) is not None:
                try:
                    await asyncio.shield(launch)  # a caller that gives up does not undo it: ``stop`` does
                except (Refused, TransportError):
                    self._forget(machine_id)
                    raise
        known = self._known[machine_id]
        if known.failure:
            raise Refused(known.failure)
        return Handle(machine_id=machine_id, offer=known.offer, phase=Phase.ACTIVE, usd_per_h=known.usd_per_h)

    async def _adopt(self, machine_id: str, offer: str) -> bool:
        """Take over what an earlier life of the coordinator ordered under this id."""
        name, rental = cluster_name(self._run_id, machine_id), self._rentals.get(offer)
        launched = any(request.makes(name) for request in await self._sdk.unfinished())
        seen = await self._sdk.sighted(await self._sdk.status([name], ask_clouds=False))
        if not launched and not seen:
            return False
        known = machine_of(self._run_id, seen[0])[1] if seen else Known()
        if not known.offer:
            known = Known(offer, rental.quote.usd_per_h if rental is not None else 0.0)
        self._known[machine_id] = known
        return True

    async def _order(self, machine_id: str, offer: str) -> None:
        rental = self._rentals.get(offer)
        if rental is None:
            raise Refused(f"an offer must be one of those listed, got {offer!r}")
        wanted = order(self._run_id, machine_id, rental, self._plan)
        join = await self._invite(machine_id)
        self._stopped.discard(wanted.cluster)
        self._launches[machine_id] = self._sdk.launch(wanted, join)
        self._known[machine_id] = Known(offer, rental.quote.usd_per_h)

    # ---- stop -----------------------------------------------------------------------------------------------------

    async def stop(self, machine_id: str) -> None:
        name = cluster_name(self._run_id, machine_id)
        if (launch := self._launches.get(machine_id)) is not None:
            await asyncio.wait([launch])  # or it could reach the server after all that follows
            launch.exception()  # told by ``start``, or of no interest any more
        launches = [request.request_id for request in await self._sdk.unfinished() if request.makes(name)]
        if launches:
            await self._sdk.result(await self._sdk.cancel(launches))
        if name not in self._downs:
            self._downs[name] = await self._sdk.down(name)
        try:
            await self._sdk.result(self._downs[name])
        except Refused as error:
            self._downs.pop(name, None)
            if not is_gone(error):
                raise
        self._downs.pop(name, None)
        if await self._sdk.sighted(await self._sdk.status([name], ask_clouds=False)):
            raise TransportError(f"SkyPilot still has {name}, the cluster of {machine_id}")
        self._forget(machine_id)
        self._stopped.add(name)

    def _forget(self, machine_id: str) -> None:
        self._known.pop(machine_id, None)
        self._launches.pop(machine_id, None)
        self._starting.pop(machine_id, None)

    # ---- machines -------------------------------------------------------------------------------------------------

    async def machines(self) -> Sequence[Handle]:
        everything = await self._sdk.sighted(await self._sdk.status(None, ask_clouds=False))
        start = prefix(self._run_id)
        seen = {sighting.name: sighting for sighting in everything if sighting.name.startswith(start)}
        submitted = {machine: launch.result() for machine, launch in self._launches.items() if _succeeded(launch)}
        unfinished = await self._sdk.unfinished()
        launching = await self._under_way(submitted, unfinished)
        leaving = {request.cluster for request in unfinished if request.kind == "down"} | set(self._downs)
        # What is being launched or taken down is locked: clouds are asked about the others.
        if quiet := seen.keys() - launching - leaving:
            asked, found = await self._ask_clouds(quiet)
            seen = {name: sighting for name, sighting in seen.items() if name not in asked} | found
        seen = {name: sighting for name, sighting in seen.items() if name not in self._stopped}
        await self._clear(seen, leaving)
        for machine_id, known in adopted(self._run_id, seen.values(), self._known, launching).items():
            if known.offer:
                self._known[machine_id] = known
        return handles(
            self._run_id,
            seen.values(),
            self._known,
            launching=launching,
            leaving=leaving,
            prices={name: rental.quote.usd_per_h for name, rental in self._rentals.items()},
        )

    async def _under_way(self, submitted: Mapping[str, str], unfinished: Sequence[Open]) -> set[str]:
        """Clusters being launched; of launches that are over, how they ended is noted.

        ``submitted`` is older than ``unfinished``: one that is in the first and not in the second is over.
        """
        open_ids = {request.request_id for request in unfinished}
        for machine_id, request_id in submitted.items():
            if request_id in open_ids:
                continue
            failure = ""
            try:
                await self._sdk.result(request_id)
            except Refused as error:
                failure = str(error)
            if machine_id in self._known:
                self._known[machine_id] = msgspec.structs.replace(self._known[machine_id], failure=failure)
            self._launches.pop(machine_id, None)
        ordered = {cluster_name(self._run_id, machine_id) for machine_id in self._launches}
        return ordered | {request.cluster for request in unfinished if request.kind == LAUNCH}

    async def _clear(self, seen: Mapping[str, Sighting], leaving: Collection[str]) -> None:
        """Have what failed launches left taken down: SkyPilot keeps some of it to be looked at, and it is billed."""
        for machine_id, known in list(self._known.items()):
            name = cluster_name(self._run_id, machine_id)
            if known.failure and name in seen and seen[name].status != UP and name not in {*leaving, *self._downs}:
                self._downs[name] = await self._sdk.down(name)

    async def _ask_clouds(self, names: Collection[str]) -> tuple[frozenset[str], dict[str, Sighting]]:
        """Of which clusters clouds were asked, and those of them that are still there."""
        if self._look is None:
            self._look = await self._sdk.status(sorted(names), ask_clouds=True), frozenset(names)
        request_id, asked = self._look
        try:
            found = await self._sdk.sighted(request_id)
        except (Refused, TransportError):
            self._look = None
            raise
        self._look = None
        return asked, {sighting.name: sighting for sighting in found}


def _succeeded(launch: asyncio.Future[str]) -> bool:
    """It reached the server."""
    return launch.done() and launch.exception() is None

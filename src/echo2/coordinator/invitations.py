"""Join strings for machines of pools.

Invariant (I9): each is good for one worker, on the machine that it was made for, until the machine would be given up.
"""

from __future__ import annotations

import asyncio
import secrets

import msgspec

from echo2.coordinator.enrolment import Registry
from echo2.coordinator.hall import Hall
from echo2.transport.join import JoinString
from echo2.transport.messages import Role

OPEN_S = 60.0
"""From the coordinator's start to its listening."""


class Invitations:
    """An ``Invite``."""

    def __init__(self, registry: Registry, hall: Hall, lifetime_s: float) -> None:
        self._registry = registry
        self._hall = hall
        self._lifetime_s = lifetime_s
        self._address: asyncio.Future[JoinString] | None = None

    def open(self, address: JoinString) -> None:
        """From now on the coordinator can be reached there; the token of ``address`` is not used."""
        future = self._future()
        if not future.done():
            future.set_result(address)

    async def __call__(self, machine_id: str) -> str:
        """Raises TimeoutError when the coordinator does not listen."""
        async with asyncio.timeout(OPEN_S):
            address = await asyncio.shield(self._future())
        token = secrets.token_urlsafe(24)
        expires = self._hall.clock.wall() + self._lifetime_s
        for operation in self._registry.issue_token(token, Role.WORKER, expires, 1, machine_id):
            self._hall.books.record(operation)
        await self._hall.durable()
        return str(msgspec.structs.replace(address, token=token))

    def _future(self) -> asyncio.Future[JoinString]:
        if self._address is None:
            self._address = asyncio.get_running_loop().create_future()
        return self._address

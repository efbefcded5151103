"""Processes of this machine as a pool: a worker each.

Invariant: a process that was started is ended when the pool is told to stop it, when the pool is closed, and with this
very program, whose end it notices (its standard input is the life line). The join string travels in its environment,
never on a command line.
"""

from __future__ import annotations

import asyncio
import contextlib
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from echo2.errors import Refused, UserError
from echo2.ports import Clock
from echo2.provisioning.capacity import SECONDS_PER_H
from echo2.provisioning.cells import shorten
from echo2.provisioning.observation import Listing, Phase, listed
from echo2.provisioning.offers import Offer
from echo2.provisioning.pools.invite import Invite
from echo2.provisioning.pools.pool import Handle

MOST_BYTES = 128
"""Of an offer's name: file names hold 255, and a number and words come to it."""
LEAVE_S = 20.0
"""Between asking a process to leave and making it."""


class Program(msgspec.Struct, frozen=True):
    """What runs on a machine."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """All of it; the join string is in it."""
    log: Path


class LocalPool:
    """Its offers are what a person says of this machine."""

    name = "local"

    def __init__(
        self, offers: Sequence[Offer], invite: Invite, program: Callable[[str, str], Program], clock: Clock
    ) -> None:
        """program: for a machine's id and a join string.  Raises UserError as ``check`` does."""
        self.check(offers)
        self._offers = {offer.name: offer for offer in offers}
        self._invite = invite
        self._program = program
        self._clock = clock
        self._processes: dict[str, Process] = {}
        self._handles: dict[str, Handle] = {}

    @staticmethod
    def check(offers: Sequence[Offer]) -> None:
        """Raises UserError for a name that no folder or file of a worker could be named after."""
        for offer in offers:
            if "/" in offer.name or len(offer.name.encode()) > MOST_BYTES:
                raise UserError(
                    f"names of the local pool's offers must have no slash and at most {MOST_BYTES} bytes, as folders "
                    f"and logs are named after them, got {shorten(offer.name)}: rename it"
                )

    async def listings(self) -> Sequence[Listing]:
        return [listed(offer, self._clock.monotonic()) for offer in self._offers.values()]

    async def start(self, machine_id: str, offer: str) -> Handle:
        if machine_id in self._handles:
            return self._handle(machine_id)
        wanted = self._offers[offer]
        self._handles[machine_id] = Handle(
            machine_id=machine_id, offer=offer, phase=Phase.STARTING, usd_per_h=wanted.usd_per_h,
            paid_until_s=self._clock.monotonic() + wanted.min_rental_h * SECONDS_PER_H,
        )  # fmt: skip
        try:
            join = await self._invite(machine_id)
            self._check_wanted(machine_id)
            self._processes[machine_id] = await self._run(self._program(machine_id, join))
            self._check_wanted(machine_id)
        except OSError as error:
            del self._handles[machine_id]
            raise Refused(f"the worker of {machine_id} cannot be started: {error}") from None
        except BaseException:
            await self.stop(machine_id)
            raise
        return self._handle(machine_id)

    async def stop(self, machine_id: str) -> None:
        self._handles.pop(machine_id, None)
        process = self._processes.pop(machine_id, None)
        if process is not None:
            await _end(process)

    async def machines(self) -> Sequence[Handle]:
        return [self._handle(machine_id) for machine_id in sorted(self._handles)]

    def _check_wanted(self, machine_id: str) -> None:
        if machine_id not in self._handles:
            raise Refused(f"{machine_id} was stopped before it had started")

    def _handle(self, machine_id: str) -> Handle:
        handle, process = self._handles[machine_id], self._processes.get(machine_id)
        if process is None:
            return handle
        if process.returncode is None:
            return msgspec.structs.replace(handle, phase=Phase.ACTIVE)
        told = f"its worker ended with exit code {process.returncode}"
        return msgspec.structs.replace(handle, phase=Phase.LOST, detail=told)

    @staticmethod
    async def _run(program: Program) -> Process:
        with program.log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *program.command, stdin=PIPE, stdout=DEVNULL, stderr=log,
                env=dict(program.environment),
                start_new_session=True,  # Ctrl-C reaches the supervisor alone, which ends everybody in order
            )  # fmt: skip


async def _end(process: Process) -> None:
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(LEAVE_S):
            await process.wait()
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        raise

"""What the person who started a run may say to its coordinator.

Invariant: nothing here is needed for the run to go on; every failure is an error to the caller and harmless to the run.
"""

from __future__ import annotations

from echo2.errors import Refused, TransportError, UserError
from echo2.run.folder import RunFolder
from echo2.transport.client import HttpTransport
from echo2.transport.join import read_join
from echo2.transport.messages import GetStatus, RunStatus, StopRun


class OperatorLine:
    """Opened at the first use; the coordinator writes the join string when it starts."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._transport: HttpTransport | None = None

    async def stop(self, reason: str) -> None:
        """Raises TransportError, Refused."""
        await (await self._open()).call(StopRun(reason))

    async def status(self) -> RunStatus:
        """Raises TransportError, Refused."""
        reply = await (await self._open()).call(GetStatus())
        if not isinstance(reply, RunStatus):
            raise Refused(f"GetStatus was answered with {type(reply).__name__}")
        return reply

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    async def _open(self) -> HttpTransport:
        if self._transport is None:
            path = self._folder.join("operator")
            try:
                join = read_join(str(path))
            except UserError as error:
                raise TransportError(f"the coordinator has not written {path} yet") from error
            transport = HttpTransport(join, self._folder.root / "keys" / "operator.credential")
            try:
                await transport.enrol("operator")
            except BaseException:
                await transport.close()
                raise
            self._transport = transport
        return self._transport

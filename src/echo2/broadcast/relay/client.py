"""A program's relay process, kept alive, as coroutines.

Invariant: what the program ordered outlives the relay process: the next one is told all of it again, and a ``bring``
goes on waiting meanwhile. Every ``bring`` ends: with the whole object, or with ``RelayStuck``, after which the object
is to be had by other means (I7). The relay never outlives the program.
"""

from __future__ import annotations

import asyncio
import sys
from asyncio import Future
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import msgspec

from echo2.broadcast.relay import control as c
from echo2.broadcast.relay.child import Patience, RelayChild
from echo2.broadcast.signing import open_signed
from echo2.errors import TransportError, UserError
from echo2.ports import EventLog

PROGRAM = (sys.executable, "-m", "echo2.broadcast.relay")


class RelayStuck(TransportError):
    """The relays do not bring the object now; ``path`` is its file, which may hold some of it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"the relays do not bring object {path.name[:16]}…: {why}")
        self.path = path


class RelayClient:
    """Use as a context: entering starts the relay process, leaving ends it."""

    def __init__(
        self,
        opening: c.Open,
        events: EventLog,
        on_announced: Callable[[c.Announced], None] = lambda announced: None,
        *,
        port_before: int = 0,
        launch_prefix: Sequence[str] = (),
        program: Sequence[str] = PROGRAM,
        patience: Patience = Patience(),  # noqa: B008 - immutable
    ) -> None:
        """port_before: where an earlier life listened, taken again if it is free and ``opening`` leaves the choice.

        launch_prefix: goes in front of the command, for example to enter a network namespace.
        """
        self._opening = opening
        self._events = events
        self._on_announced = on_announced
        self._command = (*launch_prefix, *program)
        self._patience = patience
        self._group = asyncio.TaskGroup()
        self._child: RelayChild | None = None
        """None between two."""
        self._failures = 0
        self._why_down = ""
        self._published: dict[str, c.Publish] = {}
        self._expelled: dict[str, c.Expel] = {}
        self._held: c.Hold | None = None
        self._wanted: dict[str, tuple[c.Bring, set[Future[Path]]]] = {}
        self._earlier = self._newest = c.Tally(0, 0, 0, {})
        self.port = opening.port or port_before
        """Where the relay listens, or did last. The next one listens there too unless somebody took the port."""
        self.restarts = 0

    async def __aenter__(self) -> Self:
        """Raises UserError when the relay cannot listen as told; TransportError, OSError when it does not start."""
        try:
            self._child = await self._begin()
        except UserError:
            if self.port == self._opening.port:
                raise
            self.port = self._opening.port
            self._child = await self._begin()
        await self._group.__aenter__()
        self._keeping = self._group.create_task(self._keep_alive(self._child))
        return self

    async def __aexit__(self, *error: object) -> None:
        child = self._child
        self._keeping.cancel()
        self._give_up_all("the relay was closed")
        try:
            await self._group.__aexit__(None, None, None)  # an error of the body is not the group's and stays as it is
        finally:
            if child is not None:
                await child.end()  # a task that is cancelled before its first step does not get to it

    @property
    def tally(self) -> c.Tally:
        """The newest counts; bytes and re-parentings are those of all relay processes of this client."""
        return msgspec.structs.replace(
            self._newest,
            sent_bytes=self._earlier.sent_bytes + self._newest.sent_bytes,
            received_bytes=self._earlier.received_bytes + self._newest.received_bytes,
            reparentings=self._earlier.reparentings + self._newest.reparentings,
        )

    # ---- orders ------------------------------------------------------------------------------------------------

    async def bring(self, signed_manifest: bytes) -> Path:
        """The object's file once it is whole and verified.

        Cancelling only ends the wait: what came stays, and goes on coming for others, until ``withdraw``.
        Raises RelayStuck, and IntegrityError for a manifest that is not signed by the run's key.
        """
        root = self._root_of(signed_manifest)
        if self._child is None and self._failures >= self._patience.failures:
            raise RelayStuck(self._path(root), f"the relay process keeps ending: {self._why_down}")
        order, waiters = self._wanted.setdefault(root, (c.Bring(signed_manifest), set()))
        waiter: Future[Path] = asyncio.get_running_loop().create_future()
        waiters.add(waiter)
        try:
            self._send(order)
            return await waiter
        finally:
            waiters.discard(waiter)
            if not waiters and self._wanted.get(root, ("", None))[1] is waiters:
                del self._wanted[root]

    async def publish(self, signed_manifest: bytes, path: Path) -> None:
        """Seed: send the whole and verified object in ``path`` to those who can use it. Raises IntegrityError."""
        order = c.Publish(signed_manifest, str(path))
        self._published[self._root_of(signed_manifest)] = order
        self._send(order)

    async def withdraw(self, root: str) -> None:
        """Forget the object; a node's file of it is removed. Who waits for it gets RelayStuck."""
        self._published.pop(root, None)
        self._give_up(root, "it was withdrawn")
        self._send(c.Withdraw(root))

    async def expel(self, node_id: str) -> None:
        """Seed: nothing more goes to this node or comes from it."""
        self._expelled[node_id] = c.Expel(node_id)
        self._send(self._expelled[node_id])

    async def hold(self, decoded_roots: Sequence[str]) -> None:
        """Node: the snapshots that lie decoded on this machine, all of them."""
        self._held = c.Hold(tuple(decoded_roots))
        self._send(self._held)

    def _root_of(self, signed_manifest: bytes) -> str:
        return open_signed(signed_manifest, self._opening.manifest_key).object_root

    def _path(self, root: str) -> Path:
        return Path(self._opening.folder) / root

    def _send(self, order: c.Order) -> None:
        if self._child is not None:
            self._child.send(order)

    def _waiters(self, root: str) -> list[Future[Path]]:
        """Those who wait for the object, and who do not any more after this."""
        _, waiters = self._wanted.pop(root, (None, ()))
        return [waiter for waiter in waiters if not waiter.done()]

    def _give_up(self, root: str, why: str, path: Path | None = None) -> None:
        for waiter in self._waiters(root):
            waiter.set_exception(RelayStuck(path or self._path(root), why))

    def _give_up_all(self, why: str) -> None:
        for root in list(self._wanted):
            self._give_up(root, why)

    # ---- words -------------------------------------------------------------------------------------------------

    def _hear(self, word: c.AnyWord) -> None:
        match word:
            case c.Whole(root, path):
                for waiter in self._waiters(root):
                    waiter.set_result(Path(path))
            case c.Stuck(root, path, why):
                self._give_up(root, why, Path(path))
            case c.Announced():
                self._on_announced(word)
            case c.Event(kind, fields):
                self._events.emit(kind, **fields)
                if kind == "relay_order_failed" and fields["order"] == "Bring":
                    self._give_up_all(str(fields["error"]))  # it is not said which; nobody may wait for ever
            case c.Tally():
                self._newest = word

    # ---- the process -------------------------------------------------------------------------------------------

    async def _begin(self) -> RelayChild:
        opening = msgspec.structs.replace(self._opening, port=self.port)
        child = await RelayChild.begin(self._command, opening, self._patience)
        self.port = child.port
        return child

    async def _keep_alive(self, child: RelayChild) -> None:
        """Consumes words until the context is left; begins the next process when one ends."""
        clock = asyncio.get_running_loop().time
        while True:
            began_s = clock()
            try:
                why = await child.listen(self._hear)
            finally:
                self._child = None
            self._earlier, self._newest = self.tally, c.Tally(0, 0, 0, {})
            if clock() - began_s > self._patience.healthy_s:
                self._failures = 0
            self._fail(why)
            self._child = child = await self._begin_again()
            self._say_it_all()
            self.restarts += 1
            self._events.emit("relay_restarted", why=self._why_down, restarts=self.restarts, port=self.port)

    def _say_it_all(self) -> None:
        for expel in self._expelled.values():
            self._send(expel)
        if self._held is not None:
            self._send(self._held)
        for publish in self._published.values():
            self._send(publish)
        for bring, _ in self._wanted.values():
            self._send(bring)

    async def _begin_again(self) -> RelayChild:
        while True:
            pause_s = self._patience.first_pause_s * 2.0 ** min(self._failures - 1, 30)
            await asyncio.sleep(min(pause_s, self._patience.most_pause_s))
            try:
                return await self._begin()
            except UserError as error:
                self.port = self._opening.port  # the one that was free may be somebody else's by now
                self._fail(str(error))
            except (TransportError, OSError) as error:
                self._fail(str(error))

    def _fail(self, why: str) -> None:
        self._failures += 1
        self._why_down = why
        self._events.emit("relay_down", why=why, failures=self._failures)
        if self._failures >= self._patience.failures:
            self._give_up_all(f"the relay process keeps ending: {why}")

"""What everybody in the coordinator waits in: the gate, the next batch, news of a policy, and the disk.

Invariant: no answer leaves before everything it rests on is durable (I3); whoever waits is told when anything that
could end the wait has changed, and has a deadline all the same (I7).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from echo2.broadcast.shelf import Shelf
from echo2.coordinator.books import Books
from echo2.coordinator.learner_desk import LearnerDesk
from echo2.coordinator.lines import Lines
from echo2.coordinator.operations import Operation
from echo2.coordinator.outcasts import set_aside
from echo2.coordinator.wakeup import LeaseQueue, Wakeup
from echo2.coordinator.worker_desk import WorkerDesk
from echo2.ports import Clock, Seed, Store
from echo2.transport.messages import MAX_WAIT_S


class Hall:
    """The books and their two desks, and the waits around them."""

    def __init__(
        self,
        books: Books,
        store: Store,
        shelf: Shelf,
        seed: Seed,
        clock: Clock,
        lines: Lines,
        longest_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """longest_wait_s: for which a question may be held; what connections survive."""
        self.longest_wait_s = longest_wait_s
        self.books = books
        self.config, self.events = books.config, books.events
        self.workers = WorkerDesk(books)
        self.learner = LearnerDesk(books)
        self.store = store
        self.shelf = shelf
        self.seed = seed
        self.clock = clock
        self.lines = lines
        self.queue = LeaseQueue()
        self.ready = Wakeup()
        """The next batch may be formable."""
        self.news = Wakeup()
        """An object was published."""
        self.anchors = Wakeup()
        """An anchor may be due."""
        self.calls = Wakeup()
        """A worker that stood by is needed."""
        self.claims = Wakeup()
        """A reward shall be scored again."""
        self.wait_reason = ""
        """Why the last lease was not granted."""
        self.rows_at = self.learner_at = clock.monotonic()
        """When rollouts, and the learner, last got on."""
        self.problem: Exception | None = None
        """What made the store fail: the program ends with it."""
        self._told = {entry.root: self.rows_at for entry in shelf.catalogue()}
        """When each object was last part of a worker's way; after a restart, any may be."""
        self._commits = 0
        self._unshown: deque[tuple[int, list[Operation]]] = deque()

    async def durable(self) -> None:
        """Return when everything decided so far is durable; then show it.

        A caller may be cancelled in here when its client is gone: its operations are committed all the same, and the
        next caller shows them, since a later commit is durable only after an earlier one.
        """
        operations = self.books.drain()
        if operations:
            self._commits += 1
            self._unshown.append((self._commits, operations))
        number = self._commits
        try:
            await self.store.commit(operations)
        except Exception as error:
            # Memory is now ahead of the disk: going on could acknowledge what a restart forgets.
            self.problem = error
            raise
        while self._unshown and self._unshown[0][0] <= number:
            self.lines.show(self._unshown.popleft()[1])

    def pump(self) -> None:
        """Grant what the gate lets through now; tell the learner's wait, too, that something changed."""
        now = self.clock.monotonic()
        for version in self.queue.versions():
            while (first := self.queue.first(version)) is not None:
                worker_id, waiter = first
                granted = self.workers.lease(worker_id, version, now)
                if isinstance(granted, str):
                    self.wait_reason = granted
                    break
                waiter.set_result(granted)
                if not self.workers.fruitless:
                    self.rows_at = now
        self.ready.notify()

    async def set_aside(self, worker_id: str, reason: str) -> None:
        """Take no more of this worker's work, now and in later lives; whoever found out says why."""
        if worker_id in self.books.outcasts:
            return
        set_aside(self.workers, worker_id, reason, self.clock.monotonic(), self.clock.wall())
        self.queue.turn_away(worker_id, "it was set aside")
        self.calls.notify()
        self.pump()
        await self.durable()
        await self.seed.expel(worker_id)

    async def spread(self, root: str) -> None:
        """An object of a published version is on the shelf: let it go to the workers."""
        await self.seed.publish(root)
        self.news.notify()
        self.anchors.notify()

    def under_way(self, roots: Iterable[str]) -> None:
        """Some worker brings these objects: they stay as long as it goes on saying so."""
        self._told |= dict.fromkeys(roots, self.clock.monotonic())

    def bounded(self, wait_s: float) -> float:
        """A long poll's wait, within what connections survive."""
        return min(max(wait_s, 0.0), self.longest_wait_s)

    async def prune(self) -> None:
        """Let go of what nobody needs any more."""
        now = self.clock.monotonic()
        lately_s = self.config.coordinator.dead_after_s
        self._told = {root: told_s for root, told_s in self._told.items() if now - told_s <= lately_s}
        held = {policy for policy in self.books.fleet.installed if policy is not None}
        for root in await self.shelf.prune(self.books.kept_policies(), held, set(self._told)):
            await self.seed.withdraw(root)

"""Judging that may take long, away from the event loop.

Invariant: the event loop never waits for a task's ``score``. One that does not come back holds a thread of its own and
nothing else: the lease times out, heartbeats go on, and the program can end.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from echo2.data.given import ENDINGS, ended, one_process, told
from echo2.data.task import Score
from echo2.errors import TaskFault


async def judged_apart(judge: Callable[[], Score]) -> Score:
    """``judge()`` in a thread; whatever it raises is raised here."""
    loop = asyncio.get_running_loop()
    judged: asyncio.Future[Score] = loop.create_future()

    def settle(score: Score | None, error: BaseException | None) -> None:
        if judged.done():  # nobody waits any more
            return
        if error is not None:
            judged.set_exception(error)
        else:
            judged.set_result(score)  # type: ignore[arg-type]  # without an error there is a score

    def work() -> None:
        score: Score | None = None
        error: BaseException | None = None
        try:
            with one_process():
                score = judge()
        except ENDINGS as problem:
            error = ended(problem)  # in a thread, where Ctrl-C never arrives, only their code raises these
        except BaseException as problem:
            error = problem if isinstance(problem, Exception) else TaskFault(told(problem))
        try:
            loop.call_soon_threadsafe(settle, score, error)
        except RuntimeError:
            return  # the loop has ended

    # A daemon: a pool's threads would be waited for when the program ends.
    threading.Thread(target=work, name="judge", daemon=True).start()
    return await judged

"""An engine that stands still while a snapshot is on its way, as the paper's equation (2) assumes.

Invariant: between a publish and the moment the worker has it, no generation gets on; each that runs takes so much
longer. Only while a policy is activated they get on all the same, since an activation waits for them. The product's
engines go on throughout, which is (2′): this is for comparing the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from random import Random

from echo2.rollout.engine import ActivationMode
from echo2.rollout.engines.scripted import Script, ScriptedEngine, improving_sums
from echo2.types import Policy


class PausingEngine(ScriptedEngine):
    def __init__(
        self,
        script: Script = improving_sums,
        *,
        duration: Callable[[int, int, Random], float],
        activation_s: float,
    ) -> None:
        super().__init__(script, duration=duration, sleep=self._work, activation_s=activation_s)
        self._newest: Policy | None = None
        """Published."""
        self._here: Policy | None = None
        self._is_switching = False
        self._changed_course = asyncio.Event()
        """Replaced at each change between standing still and working."""

    def published(self, policy: Policy) -> None:
        self._newest = policy
        self._note()

    async def prefetch(self, policy: Policy, folder: Path) -> None:
        await super().prefetch(policy, folder)
        self._here = policy
        self._note()

    async def activate(self, policy: Policy, mode: ActivationMode = ActivationMode.DRAIN) -> None:
        self._is_switching = True
        self._note()
        try:
            await super().activate(policy, mode)
        finally:
            self._is_switching = False
            self._note()

    @property
    def _stands_still(self) -> bool:
        behind = self._here is not None and self._newest is not None and self._newest > self._here
        return behind and not self._is_switching

    def _note(self) -> None:
        self._changed_course.set()
        self._changed_course = asyncio.Event()

    async def _work(self, seconds: float) -> None:
        left_s, loop = seconds, asyncio.get_running_loop()
        while left_s > 0:
            course = self._changed_course
            if self._stands_still:
                await course.wait()
                continue
            began_s = loop.time()
            try:
                async with asyncio.timeout(left_s):
                    await course.wait()
            except TimeoutError:
                return
            left_s -= loop.time() - began_s

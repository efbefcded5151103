"""Every installed environment of verifiers as a task: its tasks, its tools, its rewards, our policy.

Invariant: a prompt is a task's data whole; the environment's code runs in a process of its own and reaches the policy
through ``Talk`` alone, so the tokens and the mask are those of every other task. Each eval_every-th task is held out.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import re
import weakref
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from echo2.data.gyms.gym import Gym, GymError
from echo2.data.gyms.verifiers.library import Stage
from echo2.data.gyms.verifiers.messages import Played
from echo2.data.task import Episode, Message, Score, Split, Talk
from echo2.errors import ConfigError, UserError
from echo2.types import Prompt

SUPPORTED = "0.4"
"""Its interface changes with every minor version."""


class Verifiers(Gym):
    """environment: its id, as ``vf-eval`` takes it.  args: options of its set of tasks.

    settings: the rest of verifiers' own ``[env]`` table: agents by name (``max_turns``, ``runtime``, ``harness``, a
    model of their own), ``id`` of a pairing environment, ``timeout``.  eval_every: each such task is held out.
    """

    def __init__(
        self,
        *,
        environment: str,
        args: dict[str, Any] | None = None,
        settings: dict[str, Any] | None = None,
        eval_every: int = 10,
    ) -> None:
        faults = [
            f"{name} must be a table, got {value!r}"
            for name, value in (("args", args), ("settings", settings))
            if not isinstance(value or {}, dict)
        ]
        if not isinstance(eval_every, int) or isinstance(eval_every, bool) or eval_every < 2:
            faults.append(f"eval_every must be an integer of at least 2, got {eval_every!r}")
        if faults:
            raise ConfigError([f"verifiers: {fault}" for fault in faults])
        known = self.environments()
        self._module = _module_of(environment)
        if _source_of(self._module) is None:
            near = difflib.get_close_matches(str(environment), known, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"verifiers has no environment {environment!r} here{hint}; install its package")
        self._eval_every = eval_every
        self._stage = Stage(environment, args or {}, settings or {})
        weakref.finalize(self, self._stage.close)
        try:
            self._stage.check()
        except GymError as error:
            raise ConfigError(f"verifiers: {environment} must open with its args and settings: {error}") from error

    @classmethod
    def environments(cls) -> list[str]:
        if importlib.util.find_spec("verifiers") is None:
            raise ConfigError("verifiers: the package verifiers must be installed; pip install 'echo2[verifiers]'")
        version = metadata.version("verifiers")
        if not version.startswith(f"{SUPPORTED}."):
            raise ConfigError(
                f"verifiers: the package verifiers must be version {SUPPORTED}, got {version}; pip install "
                f"'echo2[verifiers]'"
            )
        return sorted(set(_built_in()) | set(_packages()))

    def size(self, split: Split) -> int | None:
        try:
            count = self._stage.count()
        except GymError as error:
            raise ConfigError(f"task {self.name} must load its tasks: {error}") from error
        if count is None:
            return None
        held_out = count // self._eval_every
        return held_out if split == "eval" else count - held_out

    def prompt(self, split: Split, index: int) -> Prompt:
        every = self._eval_every
        position = (index + 1) * every - 1 if split == "eval" else index + index // (every - 1)
        try:
            data = self._stage.load(position)
        except GymError as error:
            raise UserError(f"task {self.name} must give prompt {split}/{index}: {error}") from error
        return Prompt(f"{self.name}/{split}/{index}", self.name, {"task": data})

    def messages(self, prompt: Prompt) -> list[Message]:
        """What the task's data says; an environment may add to it when an episode opens (its tools, for one)."""
        data = prompt.content["task"]
        opening = data.get("prompt") or []
        told = [{"role": "user", "content": opening}] if isinstance(opening, str) else opening
        system = [{"role": "system", "content": data["system_prompt"]}] if data.get("system_prompt") else []
        return [{"role": part["role"], "content": _text(part.get("content"))} for part in [*system, *told]]

    def score(self, prompt: Prompt, reply: str) -> Score:
        """An episode in which ``reply`` is all that the policy says. Raises GymError where more is asked of it."""
        return _score_of(self._stage.answer(prompt.content["task"], reply))

    async def rollout(self, prompt: Prompt, talk: Talk) -> Episode:
        played = await self._stage.play(prompt.content["task"], talk.say)
        omega = {
            "rewards": played.rewards,
            "weights": played.weights,
            "metrics": played.metrics,
            "turns": played.turns,
        }
        return Episode(_score_of(played), omega)

    def fingerprint_parts(self) -> list[str]:
        """The library's version and the environment's source."""
        source = _source_of(self._module)
        assert source is not None, "checked when the task was made"
        digest = hashlib.blake2b(digest_size=16)
        for file in _files(source):
            digest.update(str(file.relative_to(source.parent)).encode() + file.read_bytes().replace(b"\r\n", b"\n"))
        return [metadata.version("verifiers"), digest.hexdigest()]


def _score_of(played: Played) -> Score:
    return Score(played.reward, played.stop)


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", f"[{part.get('type')}]") for part in content or [])


def _module_of(environment: str) -> str:
    """The module that verifiers imports for an id, which may be ``owner/name@version``."""
    return str(environment).rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_").lower()


def _folder() -> Path:
    spec = importlib.util.find_spec("verifiers")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "v1" / "tasksets"


def _source_of(module: str) -> Path | None:
    """Folder or file of an environment's module; nothing is imported."""
    if not module.isidentifier():
        return None
    if (_folder() / module).is_dir():
        return _folder() / module
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not Path(spec.origin).is_file():
        return None
    return Path(spec.origin).parent if spec.submodule_search_locations else Path(spec.origin)


def _files(source: Path) -> list[Path]:
    return sorted(source.rglob("*.py")) if source.is_dir() else [source]


def _built_in() -> Iterator[str]:
    return (path.name for path in _folder().iterdir() if (path / "__init__.py").is_file())


def _packages() -> Iterator[str]:
    """Packages that need verifiers and export a set of tasks."""
    for distribution in metadata.distributions():
        if not any(re.match(r"verifiers\b", need) for need in distribution.requires or []):
            continue
        module = _module_of(distribution.name)
        source = _source_of(module)
        if source is None:
            continue
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in _files(source)]
        if any("__all__" in text for text in texts) and any("Taskset" in text for text in texts):
            yield module.replace("_", "-")

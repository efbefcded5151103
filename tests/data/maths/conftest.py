from __future__ import annotations

import pytest

from echo2.config.sections import TaskSection
from echo2.data.maths.task import Maths
from echo2.data.registry import load_task


@pytest.fixture
def maths() -> Maths:
    task = load_task(TaskSection(name="maths"))
    assert isinstance(task, Maths)
    return task

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import TinyModel

pytest.register_assert_rewrite("engine_conformance")


@pytest.fixture
def tiny(request: Any, tmp_path: Path) -> TinyModel:
    return TinyModel(getattr(request, "param", "qwen3"), tmp_path)

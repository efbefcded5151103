"""Property tests draw the same examples in every run and have no deadline of their own: a busy machine is no fault."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("echo2", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("echo2")

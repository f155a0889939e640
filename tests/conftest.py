"""Settings of all tests: property tests draw the same examples each time, without deadlines."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("quarterdeck", derandomize=True, deadline=None)
settings.load_profile("quarterdeck")

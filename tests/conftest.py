"""Settings of all tests: property tests draw the same examples each time, without deadlines."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("quarterdeck", derandomize=True, deadline=None)
settings.load_profile("quarterdeck")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long tests run only when asked for: ``make soak``, or ``-m soak``."""
    if "soak" in config.option.markexpr:
        return
    long = [item for item in items if item.get_closest_marker("soak")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]

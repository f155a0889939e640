"""The built C++ operators are keyed by what they were built from, so all test homes share them."""

from __future__ import annotations

import os
from pathlib import Path

from engine.config import home_from_env


def share_native(home: Path) -> None:
    """``home`` gets the operators of the checkout's own home instead of building its own."""
    built = home_from_env(os.environ) / "native"
    built.mkdir(parents=True, exist_ok=True)
    if not (home / "native").exists():
        (home / "native").symlink_to(built)

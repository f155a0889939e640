"""Tensor-parallel groups (one rank for now)."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.model.runner import Group


def make_group(config: EngineConfig, *, dp: int, tp: int, start: int) -> Group | None:
    """None for a group of one."""
    if config.tp > 1:
        raise ConfigError(f"tp is {config.tp}: set it to 1")
    return None

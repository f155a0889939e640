"""``engine.json``: where the engine of a home directory listens, written by the launcher.

Clients read it to join and watch it to learn at once that the engine went down or came back.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from engine.config import EngineConfig


class RunFile(msgspec.Struct, frozen=True, kw_only=True):
    """``state`` is about the processes: ``up`` means that the router takes messages."""

    state: Literal["starting", "up", "restarting", "stopped", "failed"]
    generation: int
    pid: int
    reason: str = ""
    config: EngineConfig | None = None
    model: dict[str, Any] = {}  # ModelInfo of the first rank that was ready


def run_file_path(home: Path) -> Path:
    return home / "run" / "engine.json"


def write_run_file(path: Path, content: RunFile) -> None:
    """Atomic: a reader sees the old content or the new one."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(content))
    os.replace(draft, path)


def read_run_file(path: Path) -> RunFile | None:
    """None when there is no engine, or one of another version wrote the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunFile)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None

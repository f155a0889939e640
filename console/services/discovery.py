"""Checkpoints that appear under the weight roots are registered like those a trainer registers."""

from __future__ import annotations

from console.auth import SYSTEM
from console.database import in_database
from console.services import checkpoints, control
from console.services.file_actions import RegisterCheckpoint


async def register_new() -> int:
    """Starts a job for each new or changed checkpoint; how many they are."""
    paths = await in_database(checkpoints.discover)
    for path in paths:
        await control.start(
            SYSTEM, RegisterCheckpoint.name, {"path": path}, via="beat",
            reason="found under a weights root",
        )  # fmt: skip
    return len(paths)

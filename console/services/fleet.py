"""True reads of the fleet: one round trip to the router each."""

from __future__ import annotations

from typing import Any

from console.services.feed import as_json, unreachable
from console.services.lineage import Name
from console.worker import this_worker
from engine.errors import DeadlineExceeded, EngineUnreachable
from engine.messages import FleetSnapshot


async def read_snapshot() -> FleetSnapshot:
    """Raises ``EngineUnreachable`` and ``DeadlineExceeded``."""
    return await this_worker().engine.fleet()


async def read_fleet() -> dict[str, Any]:
    """The fleet as plain data; a picture that says why when no engine answers."""
    try:
        return as_json(await read_snapshot())
    except (EngineUnreachable, DeadlineExceeded) as error:
        return as_json(unreachable(error.message))


async def epoch_names(epochs: set[int]) -> dict[int, Name]:
    """(weight_version, token_step) of each epoch."""
    return await this_worker().lineage.names(epochs, read_snapshot)

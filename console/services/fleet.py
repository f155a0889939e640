"""True reads of the fleet: one round trip to the router each."""

from __future__ import annotations

from typing import Any

from console.database import in_database
from console.fields import MOST
from console.services import weights
from console.services.feed import as_json, unreachable
from console.worker import this_worker
from engine.errors import DeadlineExceeded, EngineUnreachable, NotFound, QuarterdeckError
from engine.messages import EpochLabel, FleetSnapshot, GetEpochReqInput

READ_DEADLINE_S = 5.0


async def read_snapshot() -> FleetSnapshot:
    """Raises ``EngineUnreachable`` and ``DeadlineExceeded``."""
    return await this_worker().engine.fleet()


async def read_fleet() -> dict[str, Any]:
    """The fleet as plain data; a picture that says why when no engine answers."""
    try:
        return as_json(await read_snapshot())
    except (EngineUnreachable, DeadlineExceeded) as error:
        return as_json(unreachable(error.message))


async def epoch_labels(epochs: set[int]) -> dict[int, EpochLabel]:
    """Version and trainer's step of each epoch."""
    return await this_worker().engine.labels(epochs)


async def read_epoch(epoch: int) -> dict[str, Any]:
    """All that router and database know of one epoch. Raises ``NotFound``."""
    if epoch > MOST:
        raise NotFound(f"there is no epoch {epoch}")
    known = await in_database(weights.lineage, epoch)
    try:
        reply = await this_worker().engine.call(
            GetEpochReqInput, deadline_s=READ_DEADLINE_S, epoch=epoch
        )
    except (EngineUnreachable, DeadlineExceeded):
        if known is None:
            raise
        return known
    if not reply.success:
        if known is None:
            raise QuarterdeckError(
                reply.message, status_code=reply.status_code, err_type=reply.err_type
            )
        return known
    [found] = reply.result["epochs"]
    job = await in_database(weights.job_of, found.get("job", ""))
    told = {**found, "job": job, "committed_at": found.get("at")}
    return {**(known or {}), **told, "source": (known or found)["source"]}

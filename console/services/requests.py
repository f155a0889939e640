"""The table of requests in flight, as the router and the ranks know it now."""

from __future__ import annotations

import time
from typing import Any

from console.services import fleet
from console.worker import this_worker
from engine.errors import QuarterdeckError
from engine.messages import GetRequestsReqInput

READ_S = 5.0
PHASES = {"waiting": "queued", "reserved": "queued"}


async def in_flight() -> dict[str, Any]:
    """``{at, requests}``, the oldest first. Raises ``EngineUnreachable``."""
    reply = await this_worker().engine.call(GetRequestsReqInput, deadline_s=READ_S)
    if not reply.success:
        raise QuarterdeckError(
            reply.message, status_code=reply.status_code, err_type=reply.err_type
        )
    snapshot = await fleet.read_snapshot()
    now = time.time()
    serving = {rank.dp: rank for rank in snapshot.ranks if rank.tp == 0}
    rows = [_row(found, serving.get(found["rank"]), now) for found in reply.result["requests"]]
    return {"at": now, "requests": sorted(rows, key=lambda row: -row["age_s"])}


def _row(found: dict[str, Any], rank: Any, now: float) -> dict[str, Any]:
    """The epoch is that of the newest token, or the rank's while there is none."""
    runs = found.get("epochs") or []
    epoch = runs[-1][1] if runs else (rank.epoch if rank is not None else None)
    phase = found["phase"]
    return {
        "rid": found["rid"],
        "parent": found["parent"],
        "worker": found["worker"] or "",
        "dp": found["rank"],
        "phase": "ending" if found["aborted"] else PHASES.get(phase, phase),
        "prompt_tokens": found["prompt_tokens"],
        "prefilled_tokens": found.get("computed_tokens", 0),
        "output_tokens": found.get("output_tokens", 0),
        "max_new_tokens": found.get("max_new_tokens", 0),
        "age_s": max(0.0, now - found["since"]),
        "epoch": epoch,
        "token_step": rank.token_step if rank is not None and epoch == rank.epoch else None,
        "actor": found.get("actor", ""),
        "priority": found["priority"],
        "retractions": found.get("retractions", 0),
    }

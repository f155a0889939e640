"""Load and internal state, out of the newest snapshot: nobody wakes a scheduler to ask it.

``/get_load`` is the old form (one row per dp rank), ``/v1/loads`` the new one.
"""

from __future__ import annotations

import time
from typing import Any

from django.http import HttpResponse
from django.views.decorators.http import require_GET

from console.access import requires
from console.api.answers import json_answer
from console.fields import BadField
from console.http import ApiRequest
from console.services import fleet
from console.version import VERSION
from engine.messages import FleetSnapshot, RankView


@require_GET
@requires("view_fleet")
async def get_load(request: ApiRequest) -> HttpResponse:
    snapshot = await fleet.read_snapshot()
    rows = [
        {
            "dp_rank": rank.dp,
            "num_reqs": rank.running + rank.waiting,
            "num_waiting_reqs": rank.waiting,
            "num_tokens": rank.kv_used,
        }
        for rank in leaders(snapshot)
    ]
    return json_answer(rows)


@require_GET
@requires("view_fleet")
async def v1_loads(request: ApiRequest) -> HttpResponse:
    """``?dp_rank=N`` for one of them; ``include`` is taken and changes nothing: all is told."""
    snapshot = await fleet.read_snapshot()
    wanted = request.GET.get("dp_rank")
    if wanted is not None and not wanted.isdecimal():
        raise BadField(f"dp_rank must be a number, got {wanted!r}", param="dp_rank")
    loads = [_load(rank) for rank in leaders(snapshot) if wanted in (None, str(rank.dp))]
    return json_answer(
        {
            "timestamp": time.time(),
            "version": VERSION,
            "dp_rank_count": len(leaders(snapshot)),
            "loads": loads,
            "aggregate": _aggregate(loads),
        }
    )


@require_GET
@requires("view_fleet")
async def get_internal_state(request: ApiRequest) -> HttpResponse:
    snapshot = await fleet.read_snapshot()
    return json_answer({"internal_states": internal_states(snapshot)})


def leaders(snapshot: FleetSnapshot) -> list[RankView]:
    """One rank speaks for its dp group."""
    return [rank for rank in snapshot.ranks if rank.tp == 0]


def internal_states(snapshot: FleetSnapshot) -> list[dict[str, Any]]:
    """One per dp rank, with the names that SGLang's benchmarks read."""
    return [
        {
            "dp_rank": rank.dp,
            "state": rank.state,
            "last_gen_throughput": rank.tokens_per_s,
            "memory_usage": {"token_capacity": rank.kv_total, "token_used": rank.kv_used},
            "num_running_reqs": rank.running,
            "num_waiting_reqs": rank.waiting,
        }
        for rank in leaders(snapshot)
    ]


def _load(rank: RankView) -> dict[str, Any]:
    computed = rank.prompt_tokens + rank.cached_tokens
    return {
        "dp_rank": rank.dp,
        "timestamp": rank.seen_at,
        "num_running_reqs": rank.running,
        "num_waiting_reqs": rank.waiting,
        "num_total_reqs": rank.running + rank.waiting,
        "num_used_tokens": rank.kv_used,
        "max_total_num_tokens": rank.kv_total,
        "token_usage": rank.kv_used / rank.kv_total if rank.kv_total else 0.0,
        "gen_throughput": rank.tokens_per_s,
        "cache_hit_rate": rank.cached_tokens / computed if computed else 0.0,
        "num_retractions": rank.retractions,
        "epoch": rank.epoch,
    }


def _aggregate(loads: list[dict[str, Any]]) -> dict[str, Any]:
    totals = {
        f"total_{name.removeprefix('num_')}": sum(load[name] for load in loads)
        for name in ("num_running_reqs", "num_waiting_reqs", "num_total_reqs", "num_used_tokens")
    }
    usage = [load["token_usage"] for load in loads]
    return {
        **totals,
        "avg_token_usage": sum(usage) / len(usage) if usage else 0.0,
        "total_gen_throughput": sum(load["gen_throughput"] for load in loads),
    }

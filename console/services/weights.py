"""The history of what was served: versions over time, updates, "what served at TIME"."""

from __future__ import annotations

import datetime
import time
from typing import Any

from django.conf import settings
from django.db.models import Count, Max, Min, Q
from django.utils import timezone

from console.models import Job, Serving, WeightUpdate
from console.models.engines import SILENT_S, ServingQuerySet
from console.services import checkpoints
from engine.messages import FleetSnapshot

LISTED = 500


def spells() -> ServingQuerySet:
    """Of this console's engine."""
    return Serving.objects.filter(engine__home=str(settings.QUARTERDECK_HOME))


def timeline(snapshot: FleetSnapshot | None) -> dict[str, Any]:
    """All that the Weights page shows; lists are newest first, times seconds since the epoch."""
    return {
        "now": time.time(),
        "versions": versions(),
        "updates": updates(),
        "groups": _groups(snapshot),
        "checkpoints": checkpoints.listed(),
    }


def versions() -> list[dict[str, Any]]:
    """Epochs that served; ``ended_at`` is None for what serves now."""
    silent = timezone.now() - datetime.timedelta(seconds=SILENT_S)
    rows = (
        spells()
        .values("epoch")
        .annotate(
            began=Min("started_at"),
            ended=Max("ended_at"),
            confirmed=Max("confirmed_at"),
            serving=Count("id", filter=Q(ended_at=None, confirmed_at__gte=silent)),
        )
        .order_by("-epoch")[:LISTED]
    )
    facts = _facts_of([row["epoch"] for row in rows])
    return [
        {
            **facts.get(row["epoch"], _unknown(row["epoch"])),
            "started_at": row["began"].timestamp(),
            "ended_at": None if row["serving"] else max(
                moment for moment in (row["ended"], row["confirmed"]) if moment
            ).timestamp(),
        }
        for row in rows
    ]  # fmt: skip


def updates() -> list[dict[str, Any]]:
    """Every update that a job made, the failed ones too."""
    rows = WeightUpdate.objects.exclude(job=None)[:LISTED]
    return [
        {
            "job": row.job_id,
            "at": row.at.timestamp(),
            "state": row.state,
            "epoch": row.epoch,
            "message": row.message,
        }
        for row in rows
    ]


def served_at(moment: float) -> dict[str, Any]:
    """Which weights each rank served then."""
    at = datetime.datetime.fromtimestamp(moment, tz=datetime.UTC)
    rows = list(spells().at(at).order_by("dp", "tp", "started_at"))
    facts = _facts_of([row.epoch for row in rows])
    ranks = [
        {"dp": row.dp, "tp": row.tp, **facts.get(row.epoch, _unknown(row.epoch))} for row in rows
    ]
    return {"at": moment, "ranks": ranks}


def lineage(epoch: int) -> dict[str, Any] | None:
    """What the database knows of an epoch, and when it served where."""
    facts = _facts_of([epoch]).get(epoch)
    if facts is None:
        return None
    return {
        **facts,
        "served": [
            {
                "dp": spell.dp,
                "tp": spell.tp,
                "started_at": spell.started_at.timestamp(),
                "ended_at": spell.ended_at.timestamp() if spell.ended_at else None,
            }
            for spell in spells().filter(epoch=epoch).order_by("dp", "tp", "started_at")
        ],
    }


def job_of(key: str) -> int | None:
    """The job whose call had this key."""
    return Job.objects.filter(key=key).values_list("pk", flat=True).first() if key else None


def _facts_of(epochs: list[int]) -> dict[int, dict[str, Any]]:
    rows = WeightUpdate.objects.filter(epoch__in=epochs)
    return {row.epoch: _facts(row) for row in rows if row.epoch is not None}


def _facts(row: WeightUpdate) -> dict[str, Any]:
    return {
        "epoch": row.epoch,
        "weight_version": row.weight_version,
        "token_step": row.token_step,
        "job": row.job_id,
        "source": row.source,
        "checksum": row.checksum,
        "policy": row.policy,
        "actor": row.actor,
        "committed_at": row.at.timestamp(),
    }


def _unknown(epoch: int) -> dict[str, Any]:
    return _facts(WeightUpdate(epoch=epoch, weight_version=f"epoch-{epoch}"))


def _groups(snapshot: FleetSnapshot | None) -> list[dict[str, Any]]:
    return [
        {
            "dp": rank.dp,
            "epoch": rank.epoch,
            "weight_version": rank.weight_version,
            "token_step": rank.token_step,
        }
        for rank in (snapshot.ranks if snapshot is not None else [])
        if rank.tp == 0
    ]

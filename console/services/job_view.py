"""Jobs for people and programs to read: lists, one in full, the same action as a curl command."""

from __future__ import annotations

import shlex
from typing import Any

import msgspec

from console.models import Job
from console.services import catalogue, effects

SHOWN_FIELDS = (
    "kind", "title", "state", "message", "progress", "ranks", "actor", "via", "late",
)  # fmt: skip


def page(*, offset: int, size: int, **filters: str) -> dict[str, Any]:
    rows = list(Job.objects.all().matching(**filters)[offset : offset + size + 1])
    return {
        "jobs": [as_json(row) for row in rows[:size]],
        "next": offset + size if len(rows) > size else None,
    }


def as_json(job: Job) -> dict[str, Any]:
    """As lists, sockets and chips show it; times are seconds since the Unix epoch."""
    fields = {name: getattr(job, name) for name in SHOWN_FIELDS}
    return {
        "id": job.pk,
        **fields,
        "created_at": job.created_at.timestamp(),
        "ended_at": job.ended_at.timestamp() if job.ended_at else None,
    }


def as_detail(job: Job, base_url: str) -> dict[str, Any]:
    """All of it, with the same action as a curl command."""
    return {
        **as_json(job),
        "reason": job.reason,
        "target": job.target,
        "request": job.args,
        "result": job.result,
        "before": job.before,
        "after": job.after,
        "events": job.events,
        "attempt": job.attempt,
        "owner": job.owner,
        "curl": curl(job.kind, job.args, base_url),
        "links": effects.links(job),
    }


def curl(kind: str, args: dict[str, Any], base_url: str) -> str:
    """The command that does the same."""
    action = catalogue.find(kind)
    route = action.route or f"/api/control/{kind}"
    fields = {"abort_all": True} if kind == "abort_all" else args
    body = msgspec.json.format(msgspec.json.encode(fields), indent=0).decode()
    return (
        f"curl -X POST {base_url}{route} \\\n"
        '  -H "Authorization: Bearer $QUARTERDECK_KEY" \\\n'
        '  -H "Content-Type: application/json" \\\n'
        f"  -d {shlex.quote(body)}"
    )

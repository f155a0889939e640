"""``/api/control/NAME``, ``/api/jobs``, ``/api/audit``, ``/api/requests``: what the pages ask."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from django.http import HttpResponse
from django.views.decorators.http import require_GET, require_POST

from console.access import requires
from console.api.answers import json_answer
from console.api.control import start
from console.database import in_database
from console.fields import read_json, read_number
from console.http import ApiRequest
from console.models import AuditEntry
from console.services import audit, control, disk, job_view, jobs, requests

PAGE_SIZE = 50
SOON_S = 0.3  # a job that ends so quickly is shown as ended at once


@require_POST
@requires("control_engine")
async def preview(request: ApiRequest, name: str) -> HttpResponse:
    """What an action would do now: ``{will, impact, curl, refusal}``."""
    given = read_json(request.body, dict[str, Any])
    seen = await control.preview(request.principal, name, given, base_url=base_url(request))
    return json_answer(asdict(seen))


@require_POST
@requires("control_engine")
async def act(request: ApiRequest, name: str) -> HttpResponse:
    """``{fields, reason, key}`` -> ``{job}``; the job goes on by itself."""
    doing = await start(request, name, read_json(request.body, dict[str, Any]))
    job = await doing.soon(SOON_S)
    return json_answer({"job": job_view.as_json(job)}, status=200 if job.ended else 202)


def base_url(request: ApiRequest) -> str:
    return f"{request.scheme}://{request.get_host()}"


# ---------------------------------------------------------------- lists


@require_GET
@requires("view_jobs")
async def list_jobs(request: ApiRequest) -> HttpResponse:
    """``?state&kind&q&offset``: newest first."""
    ask = request.GET
    page = await in_database(
        job_view.page,
        offset=read_number("offset", ask.get("offset", "0")),
        size=PAGE_SIZE,
        state=ask.get("state", ""),
        kind=ask.get("kind", ""),
        words=ask.get("q", ""),
    )
    return json_answer(page)


@require_GET
@requires("view_jobs")
async def job(request: ApiRequest, job_id: int) -> HttpResponse:
    row = await in_database(jobs.by_id, job_id)
    return json_answer({"job": await in_database(job_view.as_detail, row, base_url(request))})


@require_GET
@requires("view_jobs")
async def list_audit(request: ApiRequest) -> HttpResponse:
    """``?action&actor&q&offset``: newest first."""
    ask = request.GET
    page = await in_database(
        audit.page,
        offset=read_number("offset", ask.get("offset", "0")),
        size=PAGE_SIZE,
        actor=ask.get("actor", ""),
        action=ask.get("action", ""),
        words=ask.get("q", ""),
    )
    return json_answer(page)


@require_GET
@requires("view_jobs")
async def verify_audit(request: ApiRequest) -> HttpResponse:
    """Walks the whole chain."""
    verdict = await in_database(audit.verify)
    return json_answer({"ok": verdict.ok, **asdict(verdict)})


@require_GET
@requires("view_jobs")
async def export_audit(request: ApiRequest, form: str) -> HttpResponse:
    """All of it, oldest first: ``export.csv`` or ``export.json``."""
    if form == "csv":
        text = await in_database(audit.as_csv, AuditEntry.objects.all())
        response = HttpResponse(text, content_type="text/csv; charset=utf-8")
    else:
        response = json_answer(await in_database(audit.as_list, AuditEntry.objects.all()))
    response["Content-Disposition"] = f'attachment; filename="audit.{form}"'
    return response


@require_GET
@requires("view_jobs")
async def list_requests(request: ApiRequest) -> HttpResponse:
    """What is in flight, on every rank."""
    return json_answer(await requests.in_flight())


@require_GET
@requires("view_fleet")
async def disk_usage(request: ApiRequest) -> HttpResponse:
    return json_answer(await in_database(disk.usage))

"""``/jobs/``, ``/jobs/audit/`` and ``/jobs/<id>/``.

``jobs.html`` gets ``page``, ``tab`` ("jobs" or "audit") and ``kinds`` (names of actions for the
filter); ``job.html`` gets ``page`` and ``job_id``. Both fill themselves from ``/api/jobs``,
``/api/audit`` and ``/ws/jobs/``.
"""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest
from console.services.catalogue import ACTIONS


@require_GET
@requires("view_jobs", page=True)
def jobs(request: PageRequest) -> HttpResponse:
    context = {"page": "jobs", "tab": "jobs", "kinds": sorted(ACTIONS)}
    return render(request, "jobs.html", context)


@require_GET
@requires("view_jobs", page=True)
def audit(request: PageRequest) -> HttpResponse:
    return render(request, "jobs.html", {"page": "jobs", "tab": "audit"})


@require_GET
@requires("view_jobs", page=True)
def job(request: PageRequest, job_id: int) -> HttpResponse:
    return render(request, "job.html", {"page": "jobs", "job_id": job_id})

"""``/requests/``: what is in flight, on every rank.

``requests.html`` gets ``page`` alone: it fills itself from ``/api/requests``.
"""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest


@require_GET
@requires("view_jobs", page=True)
def requests(request: PageRequest) -> HttpResponse:
    return render(request, "requests.html", {"page": "requests"})

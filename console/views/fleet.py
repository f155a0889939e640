"""``/fleet/``: workers, ranks and engine, live.

``fleet.html`` gets ``page`` alone: it fills itself from ``/ws/fleet/``.
"""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest


@require_GET
@requires("view_fleet", page=True)
def fleet(request: PageRequest) -> HttpResponse:
    return render(request, "fleet.html", {"page": "fleet"})

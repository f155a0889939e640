"""``/weights/``: what serves, what served when, checkpoints, reload and roll back.

``weights.html`` gets ``page`` alone: it fills itself from ``/api/weights``.
"""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest


@require_GET
@requires("view_fleet", page=True)
def weights(request: PageRequest) -> HttpResponse:
    return render(request, "weights.html", {"page": "weights"})

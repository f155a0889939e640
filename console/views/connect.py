"""``/connect/``: how a program reaches this server.

``connect.html`` gets ``page``, ``base_url`` (scheme and host as the browser sees them, no slash at
the end) and ``model`` (the name of the model that this server is set up for).
"""

from __future__ import annotations

from pathlib import Path

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest


@require_GET
@requires("view_fleet", page=True)
def connect(request: PageRequest) -> HttpResponse:
    context = {
        "page": "connect",
        "base_url": f"{request.scheme}://{request.get_host()}",
        "model": Path(settings.QUARTERDECK_ENGINE.model_path).name,
    }
    return render(request, "connect.html", context)

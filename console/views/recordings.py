"""The libraries of profiles and dumps, one of them, and two compared.

The lists get ``page``; ``profile.html`` gets ``profile_id``, ``profile_compare.html`` ``a`` and
``b``; ``dump.html`` gets ``dump_id``, or ``compare`` with ``a`` and ``b``. All fill themselves from
``/api/profiles`` and ``/api/dumps``.
"""

from __future__ import annotations

from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest
from console.middleware import content_security_policy
from console.models import Dump, Profile

# speedscope writes its style sheets as <style> elements, and a reader of it is WebAssembly
VIEWER_CSP = settings.SECURE_CSP | {
    "style-src": ["'self'", "'unsafe-inline'"],
    "script-src": ["'self'", "'wasm-unsafe-eval'"],
}


@require_GET
@requires("view_fleet", page=True)
def profiles(request: PageRequest) -> HttpResponse:
    return render(request, "profiles.html", {"page": "profiles"})


@require_GET
@requires("view_fleet", page=True)
def profile(request: PageRequest, name: str) -> HttpResponse:
    row = get_object_or_404(Profile, recording_id=name)
    return render(request, "profile.html", {"page": "profiles", "profile_id": row.recording_id})


@require_GET
@requires("view_fleet", page=True)
def compare_profiles(request: PageRequest) -> HttpResponse:
    a, b = request.GET.get("a", ""), request.GET.get("b", "")
    return render(request, "profile_compare.html", {"page": "profiles", "a": a, "b": b})


@require_GET
@requires("view_fleet", page=True)
def profile_viewer(request: PageRequest, name: str) -> HttpResponse:
    """speedscope; the address of the trace is in the fragment of ``viewer_url``."""
    row = get_object_or_404(Profile, recording_id=name)
    response = render(request, "profile_viewer.html", {"profile_id": row.recording_id})
    response["Content-Security-Policy"] = content_security_policy(VIEWER_CSP)
    return response


@require_GET
@requires("view_fleet", page=True)
def dumps(request: PageRequest) -> HttpResponse:
    return render(request, "dumps.html", {"page": "dumps"})


@require_GET
@requires("view_fleet", page=True)
def dump(request: PageRequest, name: str) -> HttpResponse:
    row = get_object_or_404(Dump, recording_id=name)
    return render(request, "dump.html", {"page": "dumps", "dump_id": row.recording_id})


@require_GET
@requires("view_fleet", page=True)
def compare_dumps(request: PageRequest) -> HttpResponse:
    a, b = request.GET.get("a", ""), request.GET.get("b", "")
    return render(request, "dump.html", {"page": "dumps", "compare": True, "a": a, "b": b})

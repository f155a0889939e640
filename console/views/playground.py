"""``/playground/`` and ``/playground/<conversation>/``: chat through any worker or rank.

``playground.html`` gets ``page``, ``conversation_id`` (or None) and ``defaults`` (the model's own
sampling). The page reads lists and texts from ``/api/conversations``.
"""

from __future__ import annotations

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest
from console.services import conversations
from console.worker import this_worker
from engine.client import SamplingDefaults

DEFAULT_NEW_TOKENS = 512


@require_GET
@requires("view_fleet", page=True)
def playground(request: PageRequest, conversation_id: int | None = None) -> HttpResponse:
    if conversation_id is not None and not (
        conversations.own(request.principal).filter(pk=conversation_id).exists()
    ):
        raise Http404("there is no such conversation")
    client = this_worker().client
    joined = client is not None and client.joined
    context = {
        "page": "playground",
        "conversation_id": conversation_id,
        "defaults": client.sampling_defaults if client and joined else SamplingDefaults(),
        "max_new_tokens": DEFAULT_NEW_TOKENS,
    }
    return render(request, "playground.html", context)

"""``/playground/`` and ``/playground/<conversation>/``: chat through any worker or rank.

``playground.html`` gets ``conversation_id`` (int or None) and ``defaults`` (the parameters of a
``start`` frame with their default values). Conversations come from ``/api/conversations/``.
"""

from __future__ import annotations

import msgspec
from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest
from console.services.chat import ChatParams


@require_GET
@requires("view_fleet", page=True)
def playground(request: PageRequest, conversation_id: int | None = None) -> HttpResponse:
    context = {
        "conversation_id": conversation_id,
        "defaults": msgspec.to_builtins(ChatParams()),
    }
    return render(request, "playground.html", context)

"""``/playground/`` and ``/playground/<conversation>/``: chat through any worker or rank.

``playground.html`` gets ``page``, ``conversations`` (the newest ones, ``{id, title, updated_at}``)
and ``conversation`` (as ``/api/conversations/<id>`` answers it, or None).
"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest
from console.services import conversations
from engine.errors import NotFound

LISTED = 50


@require_GET
@requires("view_fleet", page=True)
def playground(request: PageRequest, conversation_id: int | None = None) -> HttpResponse:
    page = conversations.page(request.principal, words="", offset=0, size=LISTED)
    context = {
        "page": "playground",
        "conversations": page["conversations"],
        "conversation": _conversation(request, conversation_id),
    }
    return render(request, "playground.html", context)


def _conversation(request: PageRequest, conversation_id: int | None) -> dict[str, Any] | None:
    if conversation_id is None:
        return None
    try:
        return conversations.read(request.principal, conversation_id)
    except NotFound as error:
        raise Http404(error.message) from error

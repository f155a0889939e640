"""``/playground/`` and ``/playground/<conversation>/``: chat through any worker or rank.

``playground.html`` gets ``page``, ``conversations`` (the newest ones, ``{id, title, updated_at}``),
``conversation`` (as ``/api/conversations/<id>`` answers it, or None), its ``conversation_id``, and
the ``defaults`` of the parameters: the model's own.
"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from console.access import requires
from console.http import PageRequest
from console.services import conversations
from console.worker import this_worker
from engine.client import SamplingDefaults
from engine.errors import NotFound

DEFAULT_NEW_TOKENS = 512
LISTED = 50


@require_GET
@requires("view_fleet", page=True)
def playground(request: PageRequest, conversation_id: int | None = None) -> HttpResponse:
    client = this_worker().client
    joined = client is not None and client.joined
    context = {
        "page": "playground",
        "conversations": conversations.page(request.principal, words="", offset=0, size=LISTED)[
            "conversations"
        ],
        "conversation": _conversation(request, conversation_id),
        "conversation_id": conversation_id,
        "defaults": client.sampling_defaults if client and joined else SamplingDefaults(),
        "max_new_tokens": DEFAULT_NEW_TOKENS,
    }
    return render(request, "playground.html", context)


def _conversation(request: PageRequest, conversation_id: int | None) -> dict[str, Any] | None:
    if conversation_id is None:
        return None
    try:
        return conversations.read(request.principal, conversation_id)
    except NotFound as error:
        raise Http404(error.message) from error

"""The console's own JSON routes: fleet, conversations, websocket tickets."""

from __future__ import annotations

from typing import Any

import msgspec
from channels.db import database_sync_to_async
from django.http import HttpResponse
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console import auth
from console.access import requires
from console.api.answers import json_answer
from console.api.meta import as_base64
from console.api.schemas import ConversationBody, decode
from console.fields import BadField, read_number
from console.http import ApiRequest
from console.services import conversations, fleet, tokens
from console.worker import this_worker

PAGE_SIZE = 50


@require_GET
@requires("view_fleet")
async def read_fleet(request: ApiRequest) -> HttpResponse:
    """Engine, workers and ranks, as the router knows them now."""
    return json_answer(await fleet.read_fleet())


@require_GET
@requires("view_fleet")
async def fleet_history(request: ApiRequest) -> HttpResponse:
    """The last 15 minutes as this worker saw them: times, and one column of numbers a name."""
    return json_answer(this_worker().feed.history.as_columns())


@require_POST
@requires("view_fleet", key_only=True)
async def make_ticket(request: ApiRequest) -> HttpResponse:
    """Opens a websocket as ``?ticket=...``, for programs that cannot send headers there."""
    ticket = auth.make_ticket(request.principal)
    return json_answer({"ticket": ticket, "expires_in": auth.TICKET_AGE_S})


@require_GET
@requires("use_inference")
async def list_conversations(request: ApiRequest) -> HttpResponse:
    """``?q=words&offset=N``: newest first, ``PAGE_SIZE`` at a time."""
    page = await database_sync_to_async(conversations.page)(
        request.principal,
        words=request.GET.get("q", ""),
        offset=read_number("offset", request.GET.get("offset", "0")),
        size=PAGE_SIZE,
    )
    return json_answer(page)


@require_http_methods(["GET", "PATCH", "DELETE"])
@requires("use_inference")
async def conversation(request: ApiRequest, conversation_id: int) -> HttpResponse:
    """Read with all messages, rename or pin, delete."""
    if request.method == "DELETE":
        await database_sync_to_async(conversations.delete)(request.principal, conversation_id)
        return HttpResponse(status=204)
    if request.method == "PATCH":
        body = decode(request, ConversationBody)
        fields: dict[str, Any] = {
            name: value
            for name in body.__struct_fields__
            if (value := getattr(body, name)) is not msgspec.UNSET
        }
        await database_sync_to_async(conversations.change)(
            request.principal, conversation_id, fields
        )
    read = database_sync_to_async(conversations.read)
    return json_answer(await read(request.principal, conversation_id))


@require_GET
@requires("use_inference")
async def export_conversation(request: ApiRequest, conversation_id: int) -> HttpResponse:
    """The whole conversation as a file, ``?format=json`` (default) or ``md``."""
    form = request.GET.get("format", "json")
    if form not in ("json", "md"):
        raise BadField(f"format must be json or md, got {form!r}", param="format")
    read = database_sync_to_async(conversations.read)
    content = await read(request.principal, conversation_id)
    if form == "md":
        response = HttpResponse(
            conversations.as_markdown(content), content_type="text/markdown; charset=utf-8"
        )
    else:
        response = HttpResponse(
            msgspec.json.format(msgspec.json.encode(content), indent=2),
            content_type="application/json",
        )
    name = f"conversation-{conversation_id}.{form}"
    response["Content-Disposition"] = f'attachment; filename="{name}"'
    return response


@require_GET
@requires("use_inference")
async def token_bytes(request: ApiRequest) -> HttpResponse:
    """``?ids=1,2,3``: the exact bytes of tokens, base64, by id."""
    tokenizer = this_worker().engine.tokenizer
    ids = [read_number("ids", raw) for raw in request.GET.get("ids", "").split(",")]
    return json_answer({"tokens": {i: as_base64(tokens.token_bytes(tokenizer, i)) for i in ids}})

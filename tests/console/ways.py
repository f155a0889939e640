"""The five ways to the one door, each for any action: page, admin, HTTP, websocket, beat.

A way gives whether the action was let in. A viewer comes with a key that has no control scope.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from asgiref.sync import sync_to_async
from django.test import AsyncClient

from console.asgi import application
from console.auth import Forbidden
from console.models import Engine, Job
from console.services import schedules
from tests.console.communicator import OURS, Socket, cookie_of


@dataclass(frozen=True, kw_only=True)
class Deed:
    """``name`` of the door, ``route`` over HTTP, ``menu`` of the admin's action; ``form`` are the
    same fields where the admin's form has others."""

    name: str
    route: str
    menu: str
    fields: dict[str, Any]
    form: dict[str, Any] | None = None


async def signed_in(make_user, role: str, **fields) -> AsyncClient:
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(make_user)(role, **fields))
    return client


async def by_page(deed: Deed, make_user, make_key, role: str) -> bool:
    client = await signed_in(make_user, role)
    body = {**deed.fields, "reason": "test"}
    response = await client.post(f"/api/control/{deed.name}", body, content_type="application/json")
    assert response.status_code in (200, 202, 403), response.content
    return response.status_code != 403


async def by_http(deed: Deed, make_user, make_key, role: str) -> bool:
    scope = "control" if role == "operator" else "inference"
    key = await sync_to_async(make_key)(scope)
    headers = {"Authorization": f"Bearer {key}", "X-Quarterdeck-Reason": "test"}
    response = await AsyncClient().post(
        deed.route, json.dumps(deed.fields), content_type="application/json", headers=headers
    )
    assert response.status_code in (200, 403), response.content
    return response.status_code == 200


async def by_admin(deed: Deed, make_user, make_key, role: str) -> bool:
    client = await signed_in(make_user, role, is_staff=True)
    engine = await Engine.objects.afirst()
    fields = deed.fields if deed.form is None else deed.form
    form = {"action": deed.menu, "_selected_action": engine.pk, "apply": "1", "reason": "test",
            "key": "k1", **fields}  # fmt: skip
    response = await client.post("/admin/console/engine/", form)
    assert response.status_code in (200, 302)  # a viewer sees the list without the action
    return await Job.objects.aexists()


async def by_socket(deed: Deed, make_user, make_key, role: str) -> bool:
    client = await signed_in(make_user, role)
    cookie = await sync_to_async(cookie_of)(client)
    socket = Socket(application, "/ws/jobs/", cookie, OURS)
    assert await socket.open() == "open"
    await socket.say({"type": "act", "action": deed.name, "fields": deed.fields, "reason": "test",
                      "ref": "1"})  # fmt: skip
    seen = []
    while not seen or seen[-1]["type"] not in ("ended", "error"):
        seen.append(await socket.hear())
    await socket.leave()
    return seen[-1]["type"] == "ended"


async def by_beat(deed: Deed, make_user, make_key, role: str) -> bool:
    await sync_to_async(make_user)(role, username="nightly")
    given = {"action": deed.name, "fields": deed.fields, "as_user": "nightly", "reason": "test"}
    try:
        return await schedules.act(given, message_id="m1") is not None
    except Forbidden:
        return False


WAYS = {"page": by_page, "admin": by_admin, "http": by_http, "websocket": by_socket,
        "beat": by_beat}  # fmt: skip

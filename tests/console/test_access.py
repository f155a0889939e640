"""C15: every route and socket is closed unless it says otherwise, for each kind of visitor."""

from __future__ import annotations

import re

import pytest
from asgiref.sync import sync_to_async
from django.http import HttpResponse
from django.test import AsyncClient, Client
from django.urls import path

from console import urls
from console.access import OPEN, access_of, routes, undeclared_routes
from console.api import unsupported
from console.asgi import application
from console.sockets import SocketGate
from tests.console.communicator import OURS, Socket, cookie_for

OPEN_ROUTES = {
    "",
    "logout/",
    "health",
    "metrics",
    "ready",
    "health_generate",
    "admin/login/",
    "admin/logout/",
}
EXAMPLES = {
    "int:conversation_id": "1",
    "int:key_id": "1",
    "int:job_id": "1",
    "int:number": "1",
    "path:name": "default",
    "str:name": "pause",
    "path:object_id": "1",
    "int:content_type_id": "1",
    "str:app_label": "console",
    "app_label": "console",
    "url": "x",
}


def address(pattern: str) -> str:
    """A concrete address of a URL pattern."""
    filled = re.sub(r"<([^>]+)>", lambda m: EXAMPLES.get(m[1], "1"), pattern)
    filled = re.sub(r"\(\?P(1|console|x)[^)]*\)+", "console", filled)
    return "/" + filled.replace("^", "").replace("$", "").replace("\\Z", "")


# The first of two equal patterns answers: ours stand before the admin's own login and logout.
ROUTES = list(
    {pattern: (pattern, view, names) for pattern, view, names in [*routes()][::-1]}.values()
)
CLOSED = [route for route in ROUTES if access_of(route[1], route[2]) is not OPEN]


def test_every_route_declares_its_access():
    assert undeclared_routes() == []


def test_the_open_routes_are_these_and_no_others():
    found = {pattern for pattern, view, names in ROUTES if access_of(view, names) is OPEN}
    assert found == OPEN_ROUTES


async def test_a_stranger_gets_401_or_the_login_form(database):
    """C15, E9: every route, asked with GET and with POST."""
    stranger = AsyncClient()
    for pattern, _, _ in CLOSED:
        for ask in (stranger.get, stranger.post):
            response = await ask(address(pattern))
            if response.status_code == 302:
                assert response["Location"].startswith("/?next="), pattern
            else:
                assert response.status_code == 401, (pattern, response.content)
                assert response["WWW-Authenticate"] == "Bearer"


RIGHTS = {
    "viewer": {"view_fleet", "view_jobs"},
    "operator": {"view_fleet", "view_jobs", "use_inference", "control_engine", "manage_keys"},
    "admin": {
        "view_fleet",
        "view_jobs",
        "use_inference",
        "control_engine",
        "manage_keys",
        "manage_all_keys",
    },
}


@pytest.mark.parametrize("role", RIGHTS)
async def test_a_role_reaches_what_its_rights_name_and_nothing_else(role, make_user):
    client = AsyncClient()
    await client.aforce_login(await sync_to_async(make_user)(role))
    for pattern, view, names in CLOSED:
        response = await client.get(address(pattern))
        access = access_of(view, names)
        if access.key_only or access.key_only_get:
            assert response.status_code == 401, pattern
        else:
            assert (response.status_code == 403) == (access.permission not in RIGHTS[role]), pattern


async def test_a_get_that_changes_something_takes_a_key(make_key):
    key = await sync_to_async(make_key)("control")
    client, bearer = AsyncClient(), {"Authorization": f"Bearer {key}"}
    found = [pattern for pattern, view, names in CLOSED if access_of(view, names).key_only_get]
    assert {"flush_cache", "slow_down", "freeze_gc"} <= set(found)
    for pattern in found:
        response = await client.get(address(pattern), headers=bearer)
        assert response.status_code in (400, 503), pattern  # let in; there is no engine here


def test_a_view_that_declares_nothing_is_refused_at_run_time(sign_in, settings):
    def forgotten(request):
        return HttpResponse("secret")

    class Routes:
        urlpatterns = [path("forgotten", forgotten)]

    settings.ROOT_URLCONF = Routes
    response = sign_in("admin").get("/forgotten")
    assert response.status_code == 403
    assert b"secret" not in response.content


def test_a_key_reaches_what_its_scopes_name(make_key):
    client = Client()
    inference = {"Authorization": f"Bearer {make_key('inference')}"}
    control = {"Authorization": f"Bearer {make_key('control')}"}
    assert client.get("/api/fleet", headers=inference).status_code == 200
    assert client.get("/api/fleet", headers=control).status_code == 200
    assert client.get("/v1/models", headers=control).status_code == 403
    assert client.get("/v1/models", headers=inference).status_code == 503  # allowed; no engine here
    assert client.get("/keys/", headers=control).status_code == 403
    assert client.get("/admin/", headers=control).status_code == 403


def test_routes_of_the_field_that_are_not_built_say_so(make_key):
    """C19: and serving goes on."""
    bearer = {"Authorization": f"Bearer {make_key('control')}"}
    for name, sentence in unsupported.ROUTES.items():
        response = Client().post(f"/{name}", headers=bearer)
        assert response.status_code == 501
        assert response.json()["error"]["code"] == "not_supported"
        assert response.json()["error"]["message"] == sentence


def test_a_wrong_key_is_refused_even_beside_a_good_session(sign_in):
    response = sign_in("admin").get("/api/fleet", headers={"Authorization": "Bearer qd-wrong"})
    assert response.status_code == 401
    assert response.json()["error"]["code"] == "invalid_api_key"


def test_a_session_needs_the_csrf_token_and_a_key_does_not(make_user, make_key):
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user("operator"))
    refused = client.post("/abort_request")
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "csrf"
    bearer = {"Authorization": f"Bearer {make_key('inference')}"}
    assert client.post("/abort_request", headers=bearer).status_code == 400  # no rid was given


def test_a_foreign_host_header_is_refused():
    assert Client().get("/", headers={"host": "evil.example"}).status_code == 400


def test_a_probe_answers_whatever_the_host_header_says():
    assert Client().get("/health", headers={"host": "10.0.0.7"}).status_code == 200


# ---------------------------------------------------------------- sockets

SOCKETS = ["/ws/chat/", "/ws/fleet/", "/ws/jobs/"]


async def outcome(path: str, *headers: tuple[bytes, bytes]) -> str:
    """``open``, ``refused`` (at the handshake) or the code of the close."""
    socket = Socket(application, path, *headers)
    result = await socket.open()
    if result == "open" and not await socket.receive_nothing(timeout=0.05):
        frame = await socket.hear()
        result = str(frame["code"]) if frame["type"] == "close" else "open"
    await socket.leave()
    return result


def test_every_socket_declares_its_access():
    declared = [p for p in urls.websocket_urlpatterns if isinstance(p.callback, SocketGate)]
    assert ["/" + str(p.pattern) for p in declared] == SOCKETS
    assert all(p.callback.access is not None for p in declared)


@pytest.mark.parametrize("path", SOCKETS)
async def test_a_stranger_gets_no_frame(path, database):
    assert await outcome(path) == "4401"
    assert await outcome(path, OURS) == "4401"
    assert await outcome(path + "?ticket=forged") == "4401"
    assert await outcome(path, (b"authorization", b"Bearer qd-wrong")) == "4401"


@pytest.mark.parametrize("path", SOCKETS)
async def test_a_foreign_page_cannot_use_the_victims_cookie(path, sign_in):
    """C15."""
    cookie = await cookie_for(sign_in, "operator")
    assert await outcome(path, cookie, (b"origin", b"http://evil.example")) == "refused"
    assert await outcome(path, cookie, (b"origin", b"http://localhost:9999")) == "refused"
    assert await outcome(path, cookie, (b"origin", b"http://[")) == "refused"
    assert await outcome(path, cookie) == "4401"
    assert await outcome(path, cookie, OURS) == "open"


async def test_a_cookie_of_somebody_else_does_not_spoil_ours(sign_in):
    name, value = await cookie_for(sign_in, "operator")
    assert await outcome("/ws/fleet/", (name, b"a,b=1; " + value), OURS) == "open"


async def test_a_rebound_host_name_is_refused(sign_in):
    cookie = await cookie_for(sign_in, "operator")
    socket = Socket(application, "/ws/fleet/", (b"origin", b"http://evil.example"), cookie)
    socket.scope["headers"][0] = (b"host", b"evil.example")
    assert await socket.open() == "refused"
    await socket.leave()


async def test_a_viewer_watches_and_does_not_chat(sign_in):
    cookie = await cookie_for(sign_in, "viewer")
    assert await outcome("/ws/fleet/", cookie, OURS) == "open"
    assert await outcome("/ws/jobs/", cookie, OURS) == "open"
    assert await outcome("/ws/chat/", cookie, OURS) == "4403"


async def test_an_unknown_socket_is_refused():
    assert await outcome("/ws/nothing/") == "refused"

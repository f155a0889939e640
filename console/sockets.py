"""Websocket edge: origin, principal and the declared right, before any consumer runs.

A browser's session counts only from an allowed origin, since browsers send cookies for any page. A key or a ticket needs no origin. A peer's signature counts only on this worker's unix socket.
"""

from __future__ import annotations

import http.cookies
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import parse_qs, urlsplit

from channels.db import database_sync_to_async
from django.conf import settings
from django.http.request import split_domain_port, validate_host

from console import auth
from console.access import Access
from console.services import keys
from engine.errors import QuarterdeckError

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class SocketGate:
    """Wraps a consumer and enforces its declared access; without one it lets nobody in."""

    def __init__(self, application: Any) -> None:
        self._application: Application = application
        declared = getattr(application.consumer_class, "access", None)
        self.access: Access | None = declared if isinstance(declared, Access) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        principal = await principal_of_scope(scope)
        try:
            if self.access is None or self.access.permission is None:
                raise auth.Forbidden("this socket declares no access")
            principal.require(self.access.permission)
        except QuarterdeckError:
            await refuse_socket(scope, receive, send)
            return
        await self._application({**scope, "principal": principal}, receive, send)


async def refuse_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """Closes before accepting: the client sees 403. Also the answer of every unknown path."""
    await receive()
    await send({"type": "websocket.close", "code": 4403})


def is_private(scope: Scope) -> bool:
    """True on this worker's unix socket, which only this user's processes reach."""
    server = scope.get("server")
    return server is not None and server[1] is None


async def principal_of_scope(scope: Scope) -> auth.Principal:
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    if auth.RELAY_HEADER in headers:
        if not is_private(scope):
            return auth.ANONYMOUS
        return await database_sync_to_async(auth.principal_of_relay)(headers[auth.RELAY_HEADER])
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return await keys.authenticate(token.strip())
    ticket = parse_qs(scope["query_string"].decode("latin-1")).get("ticket")
    if ticket:
        return await database_sync_to_async(auth.principal_of_ticket)(ticket[0])
    if not origin_allowed(headers.get("origin", ""), headers.get("host", "")):
        return auth.ANONYMOUS
    cookies = http.cookies.SimpleCookie(headers.get("cookie", ""))
    session = cookies.get(settings.SESSION_COOKIE_NAME)
    if session is None:
        return auth.ANONYMOUS
    return await database_sync_to_async(auth.principal_of_session)(session.value)


def origin_allowed(origin: str, host: str) -> bool:
    """The page comes from the host that it talks to, or from a trusted origin."""
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        return False
    return urlsplit(origin).netloc.lower() == host.lower()

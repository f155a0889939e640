"""Websocket edge: origin, principal and the declared right, before any consumer runs.

A handshake that names a foreign origin is refused, since browsers send cookies for any page; a
session counts only with an origin, a key or a ticket without one too. A peer's signature counts
only on this worker's unix socket.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from channels.db import database_sync_to_async
from channels.generic.websocket import AsyncWebsocketConsumer
from django.conf import settings
from django.http import parse_cookie
from django.http.request import split_domain_port, validate_host

from console import auth
from console.access import Access
from console.services import keys
from console.services.sockets import CLOSE_FORBIDDEN, CLOSE_SIGNED_OUT
from engine.errors import QuarterdeckError

CLOSE_TRY_AGAIN = 1013

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


class SocketGate:
    """Wraps a consumer and enforces its declared access; without one it lets nobody in."""

    def __init__(self, consumer: type[AsyncWebsocketConsumer]) -> None:
        self.consumer = consumer
        self._application = cast(Application, consumer.as_asgi())
        declared = getattr(consumer, "access", None)
        self.access: Access | None = declared if isinstance(declared, Access) else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.access is None or self.access.permission is None or not may_open(scope):
            await refuse_socket(scope, receive, send)
            return
        try:
            principal = await principal_of_scope(scope)
            principal.require(self.access.permission)
        except QuarterdeckError as error:
            await _close_with_reason(error, receive, send)
            return
        await self._application({**scope, "principal": principal}, receive, send)


async def refuse_socket(scope: Scope, receive: Receive, send: Send) -> None:
    """Closes before accepting: the client sees 403. Also the answer of every unknown path."""
    await receive()
    await send({"type": "websocket.close", "code": CLOSE_FORBIDDEN})


async def _close_with_reason(error: QuarterdeckError, receive: Receive, send: Send) -> None:
    """Accepts first: a page can read the code of a close, but not of a refused handshake."""
    await receive()
    await send({"type": "websocket.accept"})
    codes = {401: CLOSE_SIGNED_OUT, 403: CLOSE_FORBIDDEN}
    code = codes.get(error.status_code, CLOSE_TRY_AGAIN)
    await send({"type": "websocket.close", "code": code, "reason": error.err_type})


def may_open(scope: Scope) -> bool:
    """A browser says where its page came from; only our own pages and trusted ones may connect."""
    headers = _headers(scope)
    return "origin" not in headers or origin_allowed(headers["origin"], headers.get("host", ""))


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def is_private(scope: Scope) -> bool:
    """True on this worker's unix socket, which only this user's processes reach."""
    server = scope.get("server")
    return server is not None and server[1] is None


async def principal_of_scope(scope: Scope) -> auth.Principal:
    headers = _headers(scope)
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
    if "origin" not in headers:  # a cookie without an origin is no browser's
        return auth.ANONYMOUS
    session_key = parse_cookie(headers.get("cookie", "")).get(settings.SESSION_COOKIE_NAME)
    if not session_key:
        return auth.ANONYMOUS
    return await auth.session_principal(session_key)


def origin_allowed(origin: str, host: str) -> bool:
    """The page comes from the host that it talks to, or from a trusted origin."""
    if origin in settings.CSRF_TRUSTED_ORIGINS:
        return True
    domain, _ = split_domain_port(host)
    if not domain or not validate_host(domain, settings.ALLOWED_HOSTS):
        return False
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:  # it is no URL
        return False

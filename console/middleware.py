"""Django middleware: the edge of every HTTP answer, Django's own for browsers, and access.

A request with a Bearer key and a health probe never touch session, CSRF or messages: they skip
Django's browser middleware, each of which costs a thread hop under ASGI.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from asgiref.sync import markcoroutinefunction
from django.conf import settings
from django.contrib.auth.middleware import AuthenticationMiddleware as DjangoAuthentication
from django.contrib.auth.views import redirect_to_login
from django.contrib.messages.middleware import MessageMiddleware as DjangoMessages
from django.contrib.sessions.middleware import SessionMiddleware as DjangoSessions
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.middleware.common import CommonMiddleware as DjangoCommon
from django.middleware.csrf import CsrfViewMiddleware as DjangoCsrf
from django.middleware.security import SecurityMiddleware as DjangoSecurity
from django.utils.deprecation import MiddlewareMixin

from console import auth
from console.access import Access, access_of
from console.api.errors import error_response
from console.database import DatabaseAway
from console.services import keys
from console.worker import this_worker
from engine.errors import QuarterdeckError

GetResponse = Callable[[HttpRequest], Awaitable[HttpResponseBase]]

PROBES = frozenset({"/health", "/ready", "/health_generate", "/metrics"})
BEARER = "bearer "


def content_security_policy(directives: dict[str, list[str]]) -> str:
    return "; ".join(f"{name} {' '.join(values)}" for name, values in directives.items())


def bearer_token(request: HttpRequest) -> str | None:
    header = request.headers.get("authorization", "")
    return header[len(BEARER) :].strip() if header.lower().startswith(BEARER) else None


class EdgeMiddleware:
    """What every answer carries: the worker's name and the browser's safety belts."""

    sync_capable = False
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        markcoroutinefunction(self)
        self.get_response = get_response
        self.headers = {
            "Content-Security-Policy": content_security_policy(settings.SECURE_CSP),
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
        }

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        response = await self.get_response(request)
        for name, value in self.headers.items():
            response.headers.setdefault(name, value)
        if not response.streaming and "Content-Length" not in response.headers:
            response.headers["Content-Length"] = str(len(response.content))  # type: ignore[attr-defined]
        worker = this_worker().id
        response.headers.setdefault("X-Quarterdeck-Worker", worker)
        response.headers.setdefault("X-Quarterdeck-Via", worker)
        return response


def _for_browsers(base: type[MiddlewareMixin]) -> Any:
    """``base``, skipped by requests that carry no browser's session."""

    class ForBrowsers(base):  # type: ignore[misc, valid-type]
        def __call__(self, request: HttpRequest) -> Any:
            """In async mode a coroutine of the response, as Django's own returns."""
            if request.path_info in PROBES or bearer_token(request) is not None:
                return self.get_response(request)
            return super().__call__(request)

    return ForBrowsers


SecurityMiddleware = _for_browsers(DjangoSecurity)
SessionMiddleware = _for_browsers(DjangoSessions)
CommonMiddleware = _for_browsers(DjangoCommon)
AuthenticationMiddleware = _for_browsers(DjangoAuthentication)
MessageMiddleware = _for_browsers(DjangoMessages)


class CsrfViewMiddleware(_for_browsers(DjangoCsrf)):  # type: ignore[misc]
    """CSRF is a danger of cookies: a request with a key is exempt whatever cookies it carries."""

    async def process_view(
        self, request: HttpRequest, view: Any, args: Any, kwargs: Any
    ) -> HttpResponseBase | None:
        if bearer_token(request) is not None:
            return None
        return super().process_view(request, view, args, kwargs)  # type: ignore[no-any-return]


class AccessMiddleware:
    """Finds the principal, then refuses what the route's declaration does not allow."""

    sync_capable = False
    async_capable = True

    def __init__(self, get_response: GetResponse) -> None:
        markcoroutinefunction(self)
        self.get_response = get_response

    async def __call__(self, request: HttpRequest) -> HttpResponseBase:
        return await self.get_response(request)

    async def process_view(
        self, request: HttpRequest, view: Any, args: Any, kwargs: Any
    ) -> HttpResponseBase | None:
        match = request.resolver_match
        access = access_of(view, match.namespaces if match else [])
        if access is None:
            return error_response(request, auth.Forbidden("this route declares no access"))
        if access.permission is None:
            return None
        try:
            principal = await _principal_of(request)
        except DatabaseAway as error:
            return error_response(request, error)
        request.principal = principal  # type: ignore[attr-defined]
        if access.page and principal.kind == "anonymous":
            return redirect_to_login(request.get_full_path())
        try:
            if _wants_key(access, request) and principal.kind != "key":
                raise auth.Unauthenticated("this route takes only an API key here")
            principal.require(access.permission)
        except QuarterdeckError as error:
            return error_response(request, error)
        return None

    def process_exception(self, request: HttpRequest, exception: Exception) -> HttpResponse | None:
        """A refusal that a view raised becomes its answer."""
        if isinstance(exception, QuarterdeckError):
            return error_response(request, exception)
        return None


def _wants_key(access: Access, request: HttpRequest) -> bool:
    return access.key_only or (access.key_only_get and request.method in ("GET", "HEAD"))


async def _principal_of(request: HttpRequest) -> auth.Principal:
    token = bearer_token(request)
    if token is not None:
        return await keys.authenticate(token)
    session_key = request.session.session_key or ""
    if not session_key:
        return auth.ANONYMOUS
    return await auth.session_principal(session_key)

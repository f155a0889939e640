"""404 and 500: JSON for programs, Django's pages (``404.html``, ``500.html``) for browsers."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.views import csrf, defaults

from console import auth
from console.access import open_to_all
from console.api.errors import error_response, internal_error
from engine.errors import NotFound


def _wants_page(request: HttpRequest) -> bool:
    return "text/html" in request.headers.get("accept", "")


@open_to_all
def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    if _wants_page(request):
        return defaults.page_not_found(request, exception)
    return error_response(request, NotFound(f"there is no route {request.path}"))


@open_to_all
def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    """A session without the page's token; keys need none."""
    if _wants_page(request):
        return csrf.csrf_failure(request, reason)
    refusal = auth.Forbidden(f"the CSRF token is missing or wrong: {reason}", err_type="csrf")
    return error_response(request, refusal)


@open_to_all
def server_error(request: HttpRequest) -> HttpResponse:
    """Called while the exception is being handled, so it is logged under the id that is shown."""
    if _wants_page(request):
        return defaults.server_error(request)
    return error_response(request, internal_error(f"{request.method} {request.path}"))

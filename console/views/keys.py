"""``/keys/``: API keys. POST ``/keys/create/`` and ``/keys/<id>/revoke/``.

``keys.html`` gets ``keys`` (rows of ``ApiKey``: name, prefix, owner, scopes, state, created_at,
expires_at, last_used_at, max_requests_per_minute, max_new_tokens), ``scopes`` (names to choose
from), ``error`` (a sentence or "") and ``new_key`` (the key itself, shown this once, or "").
The form posts ``name``, ``scope`` (repeated), ``expires_days``, ``max_requests_per_minute`` and
``max_new_tokens``; the last three may be empty.
"""

from __future__ import annotations

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from console import auth
from console.access import requires
from console.http import PageRequest
from console.models import ApiKey
from console.services import keys as service
from engine.errors import BadRequest


@require_GET
@requires("manage_keys", page=True)
def keys(request: PageRequest) -> HttpResponse:
    return _page(request)


@require_POST
@requires("manage_keys", page=True)
@never_cache
def create(request: PageRequest) -> HttpResponse:
    """Shows the key in the answer itself: it is stored nowhere, so no redirect could show it."""
    try:
        _, token = service.create_key(
            name=request.POST.get("name", ""),
            scopes=_grantable(request.principal, request.POST.getlist("scope")),
            owner_id=request.principal.user_id,
            expires_days=_number(request, "expires_days") or None,
            max_requests_per_minute=_number(request, "max_requests_per_minute"),
            max_new_tokens=_number(request, "max_new_tokens"),
        )
    except BadRequest as error:
        return _page(request, error=error.message, status=400)
    return _page(request, new_key=token)


@require_POST
@requires("manage_keys", page=True)
def revoke(request: PageRequest, key_id: int) -> HttpResponse:
    service.revoke_key(key_id=key_id, principal=request.principal)
    return redirect("keys")


def _page(
    request: PageRequest, *, new_key: str = "", error: str = "", status: int = 200
) -> HttpResponse:
    rows = ApiKey.objects.select_related("owner")
    if not request.principal.may("manage_all_keys"):
        rows = rows.filter(owner_id=request.principal.user_id)
    context = {
        "keys": rows,
        "scopes": sorted(auth.SCOPE_PERMISSIONS),
        "new_key": new_key,
        "error": error,
    }
    return render(request, "keys.html", context, status=status)


def _grantable(principal: auth.Principal, scopes: list[str]) -> list[str]:
    """Nobody gives a key rights that they lack."""
    for scope in scopes:
        for permission in sorted(auth.SCOPE_PERMISSIONS.get(scope, frozenset())):
            principal.require(permission)
    return scopes


def _number(request: PageRequest, name: str) -> int:
    raw = request.POST.get(name, "").strip() or "0"
    if not raw.isdecimal():
        raise BadRequest(f"{name} must be a number, got {raw!r}")
    return int(raw)

"""``/keys/``: API keys. POST ``/keys/create/`` and ``/keys/<id>/revoke/``.

``keys.html`` gets ``page``, ``keys`` (rows of ``ApiKey`` with ``may_revoke`` set), ``scopes``
(value, label, hint), ``may_create``, ``new_key`` (``{name, secret}``, this once, or None) and
``form`` (with its errors after a refusal, or None).
"""

from __future__ import annotations

from typing import TypedDict

from django import forms
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_POST

from console import auth
from console.access import requires
from console.http import PageRequest
from console.models import ApiKey
from console.services import keys as service
from engine.errors import QuarterdeckError

SCOPES = [
    ("inference", "Inference", "Chat, generate, read the fleet's state"),
    ("control", "Control", "Control the engine, read the fleet's state"),
]


class NewKey(TypedDict):
    name: str
    secret: str


class KeyForm(forms.Form):
    name = forms.CharField(max_length=100)
    scopes = forms.MultipleChoiceField(choices=[(value, label) for value, label, _ in SCOPES])
    expires_days = forms.IntegerField(min_value=1, max_value=3650, required=False)
    max_requests_per_minute = forms.IntegerField(min_value=0, required=False)
    max_new_tokens = forms.IntegerField(min_value=0, required=False)


@require_GET
@requires("manage_keys", page=True)
def keys(request: PageRequest) -> HttpResponse:
    return _page(request)


@require_POST
@requires("manage_keys", page=True)
@never_cache
def create(request: PageRequest) -> HttpResponse:
    """Shows the key in the answer itself: it is stored nowhere, so no redirect could show it."""
    form = KeyForm(request.POST)
    if not form.is_valid():
        return _page(request, form=form)
    given = form.cleaned_data
    try:
        key, token = service.create_key(
            name=given["name"],
            scopes=_grantable(request.principal, given["scopes"]),
            owner_id=request.principal.user_id,
            expires_days=given["expires_days"],
            max_requests_per_minute=given["max_requests_per_minute"] or 0,
            max_new_tokens=given["max_new_tokens"] or 0,
        )
    except QuarterdeckError as error:
        form.add_error(None, error.message)
        return _page(request, form=form)
    return _page(request, new_key={"name": key.name, "secret": token})


@require_POST
@requires("manage_keys", page=True)
def revoke(request: PageRequest, key_id: int) -> HttpResponse:
    service.revoke_key(key_id=key_id, principal=request.principal)
    return redirect("keys")


def _page(
    request: PageRequest, *, new_key: NewKey | None = None, form: KeyForm | None = None
) -> HttpResponse:
    rows = ApiKey.objects.select_related("owner")
    everybody = request.principal.may("manage_all_keys")
    if not everybody:
        rows = rows.filter(owner_id=request.principal.user_id)
    for row in rows:
        row.may_revoke = everybody or row.owner_id == request.principal.user_id
    context = {
        "page": "keys",
        "keys": rows,
        "scopes": SCOPES,
        "may_create": True,
        "new_key": new_key,
        "form": form,
    }
    return render(request, "keys.html", context, status=400 if form is not None else 200)


def _grantable(principal: auth.Principal, scopes: list[str]) -> list[str]:
    """Nobody gives a key rights that they lack."""
    for scope in scopes:
        for permission in sorted(auth.SCOPE_PERMISSIONS[scope]):
            principal.require(permission)
    return scopes

"""``/``: the login form when signed out, else the Fleet page. ``/logout/`` ends the session.

``registration/login.html`` gets ``form`` (username, password, non-field errors) and ``next``.
"""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth import logout
from django.contrib.auth.views import LoginView
from django.db import transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase
from django.shortcuts import redirect
from django.views.decorators.http import require_POST

from console import events
from console.access import open_to_all
from console.auth import session_digest

_form = LoginView.as_view(redirect_authenticated_user=True)


@open_to_all
def home(request: HttpRequest) -> HttpResponseBase:
    """GET shows the form, POST signs in and goes to ``next``."""
    return _form(request)


@open_to_all
def admin_login(request: HttpRequest) -> HttpResponse:
    """The admin has no login form of its own."""
    return redirect(f"{settings.LOGIN_URL}?{request.GET.urlencode()}")


@require_POST
@open_to_all
@transaction.atomic
def sign_out(request: HttpRequest) -> HttpResponse:
    """Ends the session and, through a hint, every socket that it opened on any worker."""
    session_key = request.session.session_key
    if session_key:
        events.publish_on_commit(events.SessionEnded(session=session_digest(session_key)))
    logout(request)
    return redirect(settings.LOGIN_URL)

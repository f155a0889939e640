"""Typed requests of decorated views: ``AccessMiddleware`` has set what they name."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.http import HttpRequest

from console.auth import Principal


class ApiRequest(HttpRequest):
    """Of a view that ``requires`` a right."""

    principal: Principal
    scope: dict[str, Any]  # ASGI's


class PageRequest(ApiRequest):
    """Of a page: the principal came with a session."""

    user: User

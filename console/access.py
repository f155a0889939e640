"""Who may use which route or socket. Deny by default: a route that declares nothing is refused.

``AccessMiddleware`` enforces the declarations of HTTP views, ``auth.SocketAuth`` those of sockets;
a system check and a test walk every route with ``undeclared_routes``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from django.urls import URLPattern, URLResolver, get_resolver

ADMIN_NAMESPACE = "admin"

ViewT = TypeVar("ViewT", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """``permission`` is a codename of ``models/rights.py``; None opens the route to everybody."""

    permission: str | None
    page: bool = False  # who is signed out is sent to the login form, not answered with 401
    key_only: bool = False  # takes a Bearer key, never a browser's session
    key_only_get: bool = False  # the same for GET: a link in a foreign page must change nothing


OPEN = Access(permission=None)
STAFF = Access(permission="staff", page=True)  # Django's admin, which checks again by itself


def open_to_all(view: ViewT) -> ViewT:
    """Declares a route that needs no sign-in. Health probes and the login form, little else."""
    view.access = OPEN  # type: ignore[attr-defined]
    return view


def requires(
    permission: str, *, page: bool = False, key_only: bool = False, key_only_get: bool = False
) -> Callable[[ViewT], ViewT]:
    """Declares the right that a view or consumer needs."""
    access = Access(permission=permission, page=page, key_only=key_only, key_only_get=key_only_get)

    def declare(view: ViewT) -> ViewT:
        view.access = access  # type: ignore[attr-defined]
        return view

    return declare


def access_of(view: Callable[..., Any], namespaces: list[str]) -> Access | None:
    """The declaration of a route, or None."""
    declared = getattr(view, "access", None)
    if isinstance(declared, Access):
        return declared
    return STAFF if ADMIN_NAMESPACE in namespaces else None


def routes() -> Iterator[tuple[str, Callable[..., Any], list[str]]]:
    """Every HTTP route: (pattern, view, namespaces)."""
    yield from _below(get_resolver(), "", [])


def _below(
    resolver: URLResolver, prefix: str, namespaces: list[str]
) -> Iterator[tuple[str, Callable[..., Any], list[str]]]:
    for entry in resolver.url_patterns:
        pattern = prefix + str(entry.pattern)
        if isinstance(entry, URLPattern):
            yield pattern, entry.callback, namespaces
        else:
            inner = [*namespaces, entry.namespace] if entry.namespace else namespaces
            yield from _below(entry, pattern, inner)


def undeclared_routes() -> list[str]:
    return [pattern for pattern, view, names in routes() if access_of(view, names) is None]

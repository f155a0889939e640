"""What every page gets: who looks, where they may go, and the newest picture of the fleet."""

from __future__ import annotations

from typing import Any

import msgspec
from django.http import HttpRequest

from console.auth import ANONYMOUS, Principal
from console.version import VERSION
from console.worker import this_worker

NAV: list[list[tuple[str, str, str, str]]] = [  # name, label, url, the right that it needs
    [
        ("fleet", "Fleet", "/fleet/", "view_fleet"),
        ("playground", "Playground", "/playground/", "view_fleet"),
        ("requests", "Requests", "/requests/", "view_jobs"),
        ("weights", "Weights", "/weights/", "view_fleet"),
        ("profiles", "Profiles", "/profiles/", "view_fleet"),
        ("dumps", "Dumps", "/dumps/", "view_fleet"),
        ("jobs", "Jobs", "/jobs/", "view_jobs"),
    ],
    [
        ("connect", "Connect", "/connect/", "view_fleet"),
        ("keys", "Keys", "/keys/", "manage_keys"),
        ("admin", "Records", "/admin/", "staff"),
    ],
]


def shell(request: HttpRequest) -> dict[str, Any]:
    """Context of every template (``templates/README.md``).

    ``nav``: groups of ``{name, label, url}``; ``role``: "viewer" | "operator" | "admin" | "";
    ``rights``: what the principal may do, ``{% if rights.use_inference %}``; ``fleet``: the newest
    picture as a ``snapshot`` frame without its type; ``version``: Quarterdeck's.
    """
    principal: Principal = getattr(request, "principal", ANONYMOUS)
    signed_in = principal.kind != "anonymous"
    return {
        "nav": _nav(principal),
        "role": principal.role,
        "rights": dict.fromkeys(principal.permissions, True),
        "fleet": msgspec.json.decode(this_worker().feed.snapshot) if signed_in else None,
        "version": VERSION,
    }


def _nav(principal: Principal) -> list[list[dict[str, str]]]:
    groups = [
        [
            {"name": name, "label": label, "url": url}
            for name, label, url, right in group
            if principal.may(right)
        ]
        for group in NAV
    ]
    return [group for group in groups if group]

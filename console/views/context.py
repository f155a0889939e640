"""What every page knows: who looks, from which worker, at which version."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from console.auth import ANONYMOUS
from console.version import VERSION
from console.worker import this_worker


def shell(request: HttpRequest) -> dict[str, Any]:
    """Context of every template.

    ``principal``: ``.actor``, ``.role`` ("viewer" | "operator" | "admin" | ""), ``.permissions``.
    ``rights``: the same permissions as a dict, so that ``{% if rights.use_inference %}`` reads.
    ``worker_id``: the worker that rendered the page. ``version``: Quarterdeck's.
    """
    principal = getattr(request, "principal", ANONYMOUS)
    return {
        "principal": principal,
        "rights": dict.fromkeys(principal.permissions, True),
        "worker_id": this_worker().id,
        "version": VERSION,
    }

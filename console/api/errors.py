"""Every error body of the HTTP surface, in the shape that the ``openai`` package maps."""

from __future__ import annotations

import logging
import uuid
from typing import Any

from django.http import HttpRequest, HttpResponse

from console.api.answers import json_answer
from engine.errors import NotFound, QuarterdeckError

log = logging.getLogger(__name__)

FAMILIES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    409: "conflict",
    429: "rate_limit_error",
}


class NotSupported(QuarterdeckError):
    status_code = 501
    err_type = "not_supported"


class ModelNotFound(NotFound):
    err_type = "model_not_found"


def error_body(error: QuarterdeckError, *, openai: bool = False) -> dict[str, Any]:
    """``code`` is the error's stable name, and so is ``type`` but for OpenAI's families."""
    family = FAMILIES.get(error.status_code, "server_error")
    return {
        "error": {
            "message": error.message,
            "type": family if openai else error.err_type,
            "param": getattr(error, "param", None),
            "code": error.err_type,
            "status_code": error.status_code,
            "retry_after_s": error.retry_after_s,
        }
    }


def error_response(request: HttpRequest, error: QuarterdeckError) -> HttpResponse:
    body = error_body(error, openai=request.path_info.startswith("/v1/"))
    response = json_answer(body, status=error.status_code)
    if error.retry_after_s:
        response["Retry-After"] = str(error.retry_after_s)
    if error.status_code == 401:
        response["WWW-Authenticate"] = "Bearer"
    return response


def internal_error(where: str) -> QuarterdeckError:
    """For the one broad boundary of a request: logs the traceback under an id that is returned."""
    identity = uuid.uuid4().hex[:12]
    log.exception("internal error %s in %s", identity, where)
    return QuarterdeckError(f"internal error {identity}; the server's log has the details")

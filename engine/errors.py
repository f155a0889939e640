"""Errors that cross module borders. Each carries what an HTTP answer needs."""

from __future__ import annotations


class QuarterdeckError(Exception):
    """A mistake or a state that the caller must be told about.

    ``err_type`` is a stable name, ``status_code`` the HTTP status, ``retry_after_s`` > 0 asks for
    a retry after that many seconds.
    """

    status_code = 500
    err_type = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        err_type: str | None = None,
        status_code: int | None = None,
        retry_after_s: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.err_type = err_type or self.err_type
        self.status_code = status_code or self.status_code
        self.retry_after_s = retry_after_s


class BadRequest(QuarterdeckError):
    status_code = 400
    err_type = "invalid_request_error"


class NotFound(QuarterdeckError):
    status_code = 404
    err_type = "not_found"


class Conflict(QuarterdeckError):
    status_code = 409
    err_type = "conflict"


class Overloaded(QuarterdeckError):
    status_code = 503
    err_type = "overloaded"


class EngineUnreachable(QuarterdeckError):
    """No engine answers: it is starting, restarting, or gone."""

    status_code = 503
    err_type = "engine_unreachable"


class DeadlineExceeded(QuarterdeckError):
    status_code = 504
    err_type = "deadline_exceeded"


class ConfigError(QuarterdeckError):
    """A setting stops the start; the sentence names the setting and the valid values."""

    err_type = "config_error"

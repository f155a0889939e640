"""Log lines of the console's processes: stderr, one line each, our faults with their traceback."""

from __future__ import annotations

import logging
from typing import Any


def _has_traceback(record: logging.LogRecord) -> bool:
    """Refusals (4xx, 503) are the caller's business; Django logs them without a traceback."""
    return bool(record.exc_info)


CONFIG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "filters": {
        "faults": {"()": "django.utils.log.CallbackFilter", "callback": _has_traceback},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line"}},
    "root": {"handlers": ["stderr"], "level": "INFO"},
    "loggers": {
        "uvicorn": {"level": "WARNING"},
        "httpx": {"level": "WARNING"},
        "django.request": {"filters": ["faults"]},
    },
}

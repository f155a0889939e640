"""Database work of async code that must know, within a bounded time, that the database is away.

Threads of its own: a database that hangs never holds up what runs on the thread that Django's
views share.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from django.db import InterfaceError, OperationalError, close_old_connections

from engine.errors import QuarterdeckError

log = logging.getLogger(__name__)

THREADS = 4
PATIENCE_S = 25.0  # longer than SQLite's busy timeout

P = ParamSpec("P")
T = TypeVar("T")


class DatabaseAway(QuarterdeckError):
    """Down, locked or unreachable; whatever was asked of it may or may not have happened."""

    status_code = 503
    err_type = "database_away"


_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="database")


async def in_database(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``work(...)`` on a thread; raises ``DatabaseAway``."""
    return await within(PATIENCE_S, work, *args, **kwargs)


async def within(timeout_s: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like ``in_database``, but gives up after ``timeout_s``; the work may still happen then."""
    call = functools.partial(_run, work, *args, **kwargs)
    future = asyncio.get_running_loop().run_in_executor(_pool, call)
    try:
        return await asyncio.wait_for(future, timeout_s)
    except TimeoutError:
        raise DatabaseAway(f"the database did not answer within {timeout_s:g} s") from None


def _run(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    close_old_connections()
    try:
        return work(*args, **kwargs)
    except (OperationalError, InterfaceError) as error:
        raise DatabaseAway(f"the database is away: {error}", retry_after_s=2) from error
    finally:
        close_old_connections()

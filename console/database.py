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

from django.db import InterfaceError, OperationalError, close_old_connections, connection

from engine.errors import QuarterdeckError

log = logging.getLogger(__name__)

THREADS = 4
AUTH_THREADS = 2  # for reads that decide who may act: never behind writers that wait for a lock
AUTH_PATIENCE_S = 2.0  # a command in an emergency waits no longer
PATIENCE_S = 20.0
GRACE_S = 0.5  # for the answer of a database that gave up waiting by itself

P = ParamSpec("P")
T = TypeVar("T")


class DatabaseAway(QuarterdeckError):
    """Down, locked or unreachable; whatever was asked of it may or may not have happened."""

    status_code = 503
    err_type = "database_away"


_pool = ThreadPoolExecutor(THREADS, thread_name_prefix="database")
_auth_pool = ThreadPoolExecutor(AUTH_THREADS, thread_name_prefix="auth")


async def in_database(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``work(...)`` on a thread; raises ``DatabaseAway``."""
    return await _wait(_pool, PATIENCE_S, functools.partial(work, *args, **kwargs))


async def within(timeout_s: float, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Like ``in_database``, but gives up after ``timeout_s``; the work may still happen then."""
    return await _wait(_pool, timeout_s, functools.partial(work, *args, **kwargs))


async def authenticating(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """For reads that decide who may act."""
    return await _wait(_auth_pool, AUTH_PATIENCE_S, functools.partial(work, *args, **kwargs))


async def _wait(pool: ThreadPoolExecutor, timeout_s: float, work: Callable[[], T]) -> T:
    call = functools.partial(_run, timeout_s, work)
    future = asyncio.get_running_loop().run_in_executor(pool, call)
    try:
        async with asyncio.timeout(timeout_s + GRACE_S):
            result = await future
    except TimeoutError:
        raise DatabaseAway(f"the database did not answer within {timeout_s:g} s") from None
    return result


def _run(timeout_s: float, work: Callable[[], T]) -> T:
    close_old_connections()
    try:
        _limit_waiting(timeout_s)
        return work()
    except (OperationalError, InterfaceError) as error:
        raise DatabaseAway(f"the database is away: {error}", retry_after_s=2) from error
    finally:
        close_old_connections()


def _limit_waiting(timeout_s: float) -> None:
    """SQLite waits for a lock no longer than the caller does, so that its thread is free again.

    The connection ends with this work. (PostgreSQL has ``lock_timeout`` in its own settings.)
    """
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(f"PRAGMA busy_timeout = {int(1000 * timeout_s)}")

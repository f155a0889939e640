"""Rates per API key, counted over all web workers in valkey; by this worker alone without it."""

from __future__ import annotations

import logging
import time
from collections import Counter

from redis.exceptions import RedisError

from console.auth import Principal
from console.worker import this_worker
from engine.errors import QuarterdeckError

log = logging.getLogger(__name__)

WINDOW_S = 60


class RateLimited(QuarterdeckError):
    status_code = 429
    err_type = "rate_limit_error"


_local: Counter[str] = Counter()  # windows counted while valkey was away


async def count_requests(principal: Principal, count: int) -> None:
    """Counts ``count`` requests of a key in this minute; raises ``RateLimited`` past its limit."""
    limit = principal.max_requests_per_minute
    if not limit:
        return
    now = time.time()
    window = f"quarterdeck:rate:{principal.identity}:{int(now // WINDOW_S)}"
    if await _add(window, count) > limit:
        raise RateLimited(
            f"{principal.actor} may send {limit} requests per minute",
            retry_after_s=int(WINDOW_S - now % WINDOW_S) + 1,
        )


async def _add(window: str, count: int) -> int:
    """The window's total after adding ``count``."""
    try:
        async with this_worker().valkey.pipeline() as pipe:
            pipe.incrby(window, count)
            pipe.expire(window, 2 * WINDOW_S)
            total, _ = await pipe.execute()
        return int(total)
    except (RedisError, OSError) as error:
        log.warning("rates are counted by this worker alone: %s", error)
    if window not in _local:
        _local.clear()  # a new window, or another key's: forgets little, stays small
    _local[window] += count
    return _local[window]

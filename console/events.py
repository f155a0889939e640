"""Hints between processes: "this changed", after commit, in at most 4 KB.

A hint is never the truth. Whoever gets one reads the row; whoever misses one learns it by polling.
Hints travel through the channel layer as one group with one listener per web worker, so that the
death of the broker touches no socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
from asgiref.sync import async_to_sync
from channels.layers import BaseChannelLayer, get_channel_layer
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction
from kombu.exceptions import KombuError
from redis.exceptions import RedisError

from console.celery import app

log = logging.getLogger(__name__)

GROUP = "hints"
HINT_BYTES = 4096
RECEIVE_S = 5.0  # then the group is joined again: a restarted broker has forgotten its members
RETRY_S = 1.0


class Event(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that other processes may want to know."""


class SessionEnded(Event, frozen=True):
    """Somebody signed out: their sockets close. ``session`` is a digest of the session's key."""

    session: str


class KeyRevoked(Event, frozen=True):
    key_id: int


class JobChanged(Event, frozen=True):
    job_id: int


Known = SessionEnded | KeyRevoked | JobChanged


def publish_on_commit(event: Known) -> None:
    """Tells every web worker once the transaction is through. Call it from synchronous code."""
    data = msgspec.json.encode(event)
    if len(data) > HINT_BYTES:
        raise ValueError(f"a hint has {len(data)} bytes, the limit is {HINT_BYTES}")
    transaction.on_commit(lambda: _send(data.decode()))


def _layer() -> BaseChannelLayer:
    layer = get_channel_layer()
    if layer is None:
        raise ImproperlyConfigured("CHANNEL_LAYERS has no default layer")
    return layer


def enqueue_on_commit(task: str, *args: Any) -> None:
    """Hands work to Celery by name once the transaction is through.

    Nobody waits for the broker (a client needs 6 s to find it away), and one that is away is no
    error: what waits in the database is found by ``reconcile``.
    """
    transaction.on_commit(lambda: _broker.submit(_enqueue, task, args))


def _enqueue(task: str, args: tuple[Any, ...]) -> None:
    try:
        app.send_task(task, args=args, retry=False)
    except (KombuError, RedisError, OSError) as error:
        log.warning("%s waits in the database, the broker is away: %s", task, error)


_broker = ThreadPoolExecutor(1, thread_name_prefix="broker")
_loop: asyncio.AbstractEventLoop | None = None


def use_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """The loop of this process that hints are sent on: a connection belongs to its loop, and one
    loop per hint would leave a dead one behind each time."""
    global _loop
    _loop = loop


def _send(data: str) -> None:
    if _loop is not None and not _loop.is_closed():
        asyncio.run_coroutine_threadsafe(_publish(data), _loop)
    else:
        async_to_sync(_publish)(data)


async def _publish(data: str) -> None:
    try:
        await _layer().group_send(GROUP, {"type": "hint", "data": data})
    except (RedisError, OSError) as error:
        log.warning("a hint was lost (polling makes up for it): %s", error)


async def listen(handle: Callable[[Known], None]) -> None:
    """Calls ``handle`` for each hint until cancelled; survives a broker that comes and goes."""
    layer = _layer()
    while True:
        try:
            channel = await layer.new_channel()
            while True:
                await layer.group_add(GROUP, channel)
                try:
                    async with asyncio.timeout(RECEIVE_S):
                        message = await layer.receive(channel)
                except TimeoutError:
                    continue
                handle(msgspec.json.decode(message["data"], type=Known))
        except (RedisError, OSError) as error:
            log.warning("no hints for now: %s", error)
            await asyncio.sleep(RETRY_S)

"""Opening and closing of this web worker, as ASGI's lifespan events ask for it.

The worker is open before it is ready: it answers ``/health`` at once and ``/ready`` when the engine
has answered, so a slow engine start never looks like a dead worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

from channels.db import database_sync_to_async
from django.conf import settings

from console import auth, events
from console.services import control, keys, reconcile, record
from console.worker import Worker, this_worker
from engine.client import EngineClient

log = logging.getLogger(__name__)

LAST_WORDS_S = 1.0  # for the end frames, when the worker leaves


class Lifespan:
    """The ASGI application of the ``lifespan`` scope."""

    def __init__(self) -> None:
        self._tasks: list[asyncio.Task[None]] = []

    async def __call__(
        self,
        scope: dict[str, Any],
        receive: Callable[[], Awaitable[dict[str, Any]]],
        send: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        worker = this_worker()
        await receive()
        await self._open(worker)
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._close(worker)
        await send({"type": "lifespan.shutdown.complete"})

    async def _open(self, worker: Worker) -> None:
        events.use_loop(asyncio.get_running_loop())
        await database_sync_to_async(record.fail_lost_answers)(worker.id)
        worker.client = await EngineClient.connect(
            settings.QUARTERDECK_RUN_FILE,
            kind="web",
            worker_id=worker.id,
            via=worker.unix_path,
        )
        worker.client.subscribe(worker.feed.put)
        worker.client.subscribe(worker.chronicle.put)
        works = {
            "fleet-feed": worker.feed.watch(),
            "socket-sweep": worker.sockets.sweep(),
            "keys": keys.watch(),
            "hints": events.listen(on_hint),
            "chronicle": worker.chronicle.watch(worker.client),
            "jobs-feed": worker.jobs.watch(),
            "reconcile": reconcile.watch(),
        }
        for name, work in works.items():
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(end_worker_if_broken)
            self._tasks.append(task)

    async def _close(self, worker: Worker) -> None:
        await leave(worker)
        await control.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await reconcile.close()
        if worker.client is not None:
            await worker.client.close()
            worker.client = None
        events.use_loop(None)
        await worker.valkey.aclose()


def end_worker_if_broken(task: asyncio.Task[None]) -> None:
    """A fault of ours in work that never ends: this worker is no good without it, and the
    supervisor starts another one."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("%s broke: this worker ends", task.get_name(), exc_info=error)
        os.kill(os.getpid(), signal.SIGTERM)


async def leave(worker: Worker) -> None:
    """Refuses what is new, aborts what runs, and lets every socket hear how its streams ended."""
    worker.leaving = True
    await worker.hub.close()
    if worker.pumps:
        await asyncio.wait(worker.pumps, timeout=LAST_WORDS_S)


def on_hint(event: events.Known) -> None:
    """What a web worker does about a hint; none of it is needed for truth, only for speed."""
    sockets = this_worker().sockets
    match event:
        case events.SessionEnded():
            auth.forget_session(event.session)
            sockets.end_session(event.session)
        case events.KeyRevoked():
            keys.forget(event.key_id)
            sockets.end_key(event.key_id)
        case events.JobChanged():
            this_worker().jobs.look()

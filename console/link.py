"""A process that is no web worker and yet talks to the engine: Celery's pool, commands.

One event loop on a thread of its own, for the process's whole life, holds the engine client and
the hints' connection; synchronous code hands it coroutines. (A loop per call would leave
connections of dead loops behind.) Created after the fork, in the process that uses it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

from django.conf import settings

from console import events
from console.services import control
from console.worker import Worker, become
from engine.client import EngineClient

T = TypeVar("T")

JOIN_S = 15.0


class Link:
    """Names this process's worker and connects it to the engine when it is first asked to."""

    def __init__(self, kind: Literal["job", "command"]) -> None:
        self._kind = kind
        self._worker = Worker(f"{kind}-{os.getpid()}")
        become(self._worker)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        events.use_loop(self._loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which may use ``this_worker().client``."""
        return asyncio.run_coroutine_threadsafe(self._with_client(work), self._loop).result()

    async def _with_client(self, work: Coroutine[Any, Any, T]) -> T:
        if self._worker.client is None:
            self._worker.client = await EngineClient.connect(
                settings.QUARTERDECK_RUN_FILE, kind=self._kind, worker_id=self._worker.id
            )
        await self._wait_joined(self._worker.client)
        return await work

    @staticmethod
    async def _wait_joined(client: EngineClient) -> None:
        """For a while: what needs the engine says by itself that it is not reachable."""
        for _ in range(int(JOIN_S / 0.1)):
            if client.joined:
                return
            await asyncio.sleep(0.1)

    def close(self) -> None:
        """Gives the lease back."""
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        events.use_loop(None)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await control.close()
        if self._worker.client is not None:
            await self._worker.client.close()
            self._worker.client = None
        await self._worker.valkey.aclose()


_link: Link | None = None


def process_link() -> Link:
    """The link of this Celery process, made at its first use."""
    global _link
    if _link is None:
        _link = Link("job")
    return _link


def close_process_link() -> None:
    global _link
    if _link is not None:
        _link.close()
        _link = None

"""This web worker: its name, its engine client, its streams and sockets.

One process is one worker. Views, consumers and services ask ``this_worker()``; ``lifespan.py``
opens and closes it. In a process that serves nothing (a command, Celery) no engine is reachable.
"""

from __future__ import annotations

import asyncio

from django.conf import settings
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from console.services.chronicle import Chronicle
from console.services.feed import FleetFeed
from console.services.jobs_feed import JobsFeed
from console.services.sockets import Sockets
from console.services.streams import StreamHub
from engine.client import EngineClient
from engine.errors import EngineUnreachable


class Worker:
    """``unix_path`` is the socket on which the other workers reach this one."""

    def __init__(self, worker_id: str = "0", unix_path: str = "") -> None:
        self.id = worker_id
        self.unix_path = unix_path
        self.client: EngineClient | None = None
        self.valkey: Redis = Redis.from_url(
            settings.REDIS_URL, socket_timeout=1.0, retry=Retry(NoBackoff(), 0)
        )  # without it a client tries for 6 s before it says that valkey is away
        self.hub = StreamHub(worker=worker_id, grace_s=settings.QUARTERDECK_RESUME_GRACE_S)
        self.feed = FleetFeed()
        self.chronicle = Chronicle()
        self.jobs = JobsFeed()
        self.sockets = Sockets()
        self.pumps: set[asyncio.Task[None]] = set()  # each carries one stream to one socket
        self.leaving = False

    @property
    def engine(self) -> EngineClient:
        if self.client is None or self.leaving:
            raise EngineUnreachable("this worker is not joined to an engine", retry_after_s=2)
        return self.client

    @property
    def ready(self) -> bool:
        """This worker takes requests and some rank can run them."""
        snapshot = self.client.snapshot if self.client is not None else None
        return (
            not self.leaving
            and snapshot is not None
            and any(rank.state == "running" for rank in snapshot.ranks)
        )


_current: Worker | None = None


def this_worker() -> Worker:
    global _current
    if _current is None:
        _current = Worker()
    return _current


def become(worker: Worker) -> None:
    """Names this process's worker, before the application opens it."""
    global _current
    _current = worker

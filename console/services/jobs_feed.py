"""Jobs as they change: one read of the table per change for all sockets of this worker.

Path: a hint "job 17 changed" (events.py), or two seconds without one -> here -> consumers/jobs.py.
The table is read only while somebody listens; a hint that was lost costs two seconds.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable

import msgspec
from django.utils import timezone

from console.database import DatabaseAway, in_database
from console.models import Job
from console.services import job_view

log = logging.getLogger(__name__)

POLL_S = 2.0
OVERLAP_S = 10.0  # a transaction may show up so much later than the time it carries
FIRST = 20  # jobs of the first frame

Listener = Callable[[bytes], None]


class JobsFeed:
    """``subscribe`` gets one encoded frame per changed job."""

    def __init__(self) -> None:
        self._listeners: set[Listener] = set()
        self._wake = asyncio.Event()
        self._seen: dict[int, int] = {}  # job -> version of the newest frame
        self._since = timezone.now()

    def look(self) -> None:
        """Something changed."""
        self._wake.set()

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        self._listeners.add(listener)
        self.look()
        return lambda: self._listeners.discard(listener)

    async def first_frame(self) -> bytes:
        """The newest jobs, whatever their state; none while the database is away."""
        try:
            rows = await in_database(_newest)
        except DatabaseAway as error:
            log.warning("no jobs are shown for now: %s", error.message)
            rows = []
        return msgspec.json.encode(
            {"type": "jobs", "jobs": [job_view.as_json(row) for row in rows]}
        )

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            try:
                async with asyncio.timeout(POLL_S):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            if not self._listeners:
                self._since, self._seen = timezone.now(), {}
                continue
            try:
                self._tell(await in_database(_changed_since, self._since))
            except DatabaseAway as error:
                log.warning("jobs are not followed for now: %s", error.message)

    def _tell(self, rows: list[Job]) -> None:
        for row in rows:
            assert row.pk is not None
            if self._seen.get(row.pk, 0) >= row.version:
                continue
            self._seen[row.pk] = row.version
            frame = msgspec.json.encode({"type": "job", "job": job_view.as_json(row)})
            for listener in list(self._listeners):
                listener(frame)
        if rows:
            self._since = rows[-1].changed_at
            shown = {row.pk for row in rows}
            self._seen = {pk: seen for pk, seen in self._seen.items() if pk in shown}


def _newest() -> list[Job]:
    return list(Job.objects.order_by("-id")[:FIRST])


def _changed_since(moment: datetime.datetime) -> list[Job]:
    since = moment - datetime.timedelta(seconds=OVERLAP_S)
    return list(Job.objects.all().changed_since(since))

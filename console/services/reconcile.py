"""Every 10 s and at every worker's start: no job is left behind by a process that ended.

Engine jobs whose owner is gone are settled by asking the engine; file jobs that wait or lost their
owner are handed to Celery again; jobs in the journal are written down. Nothing here relies on the
broker to deliver anything twice.
"""

from __future__ import annotations

import asyncio
import logging

from django.utils import timezone

from console import events
from console.database import DatabaseAway, in_database
from console.models import Job
from console.services import catalogue, effects, jobs, journal, sending
from console.services.file_actions import FileAction

log = logging.getLogger(__name__)

EVERY_S = 10.0

_settling: set[asyncio.Task[None]] = set()


async def watch() -> None:
    """Reconciles until cancelled."""
    while True:
        try:
            await reconcile()
        except DatabaseAway as error:
            log.warning("jobs are not reconciled: %s", error.message)
        await asyncio.sleep(EVERY_S)


async def reconcile() -> int:
    """One round; how many engine jobs this process took over."""
    await in_database(journal.read_in)
    taken = await in_database(_look)
    for job in taken:
        task = asyncio.create_task(sending.settle_and_end(job), name=f"settle job {job.pk}")
        _settling.add(task)
        task.add_done_callback(_settling.discard)
    return len(taken)


async def round_to_the_end() -> int:
    """One round, and the end of every job that it took over."""
    taken = await reconcile()
    await asyncio.gather(*_settling)
    return taken


async def close() -> None:
    """This process leaves: jobs whose end it still waits for are handed over."""
    settling = list(_settling)
    for task in settling:
        task.cancel()
    await asyncio.gather(*settling, return_exceptions=True)


def _look() -> list[Job]:
    """Engine jobs that are this process's now; file jobs go to Celery."""
    now = timezone.now()
    taken: list[Job] = []
    for job in (*Job.objects.all().orphans(now), *Job.objects.all().waiting(now)):
        if issubclass(catalogue.find(job.kind), FileAction):
            events.enqueue_on_commit(effects.RUN_TASK, job.pk)
        elif (mine := jobs.take(job.pk)) is not None:
            taken.append(mine)
    return taken

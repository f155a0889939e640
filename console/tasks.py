"""Celery tasks: two lines around a service each. Beat's schedule is rows (0003, 0005)."""

from __future__ import annotations

import logging
from typing import Any

from celery import Task, shared_task

from console.auth import SYSTEM
from console.link import process_link
from console.services import control, conversations, discovery, file_jobs, reconcile, schedules

log = logging.getLogger(__name__)


@shared_task(name="console.delete_old_chats")
def delete_old_chats() -> int:
    deleted = conversations.delete_old_chats()
    log.info("retention deleted %d conversations", deleted)
    return deleted


@shared_task(name="console.run_job")
def run_job(job_id: int) -> None:
    """A file job: checksum, merge, summary, retention."""
    file_jobs.run(job_id)


@shared_task(name="console.reconcile")
def reconcile_jobs() -> int:
    return process_link().run(reconcile.round_to_the_end())


@shared_task(name=schedules.ACT_TASK, bind=True)
def act(self: Task[Any, Any], /, **fields: Any) -> None:
    """A scheduled control action; its fields are those of ``schedules.Schedule``."""
    process_link().run(schedules.act(fields, message_id=self.request.id or ""))


@shared_task(name="console.find_checkpoints")
def find_checkpoints() -> int:
    return process_link().run(discovery.register_new())


@shared_task(name="console.tidy_disk")
def tidy_disk() -> None:
    process_link().run(control.start(SYSTEM, "tidy_disk", {}, via="beat", reason="the disk quota"))

"""Celery tasks: two lines around a service each. Beat's schedule is rows (migration 0003)."""

from __future__ import annotations

import logging

from celery import shared_task

from console.services import conversations

log = logging.getLogger(__name__)


@shared_task(name="console.delete_old_chats")
def delete_old_chats() -> int:
    deleted = conversations.delete_old_chats()
    log.info("retention deleted %d conversations", deleted)
    return deleted

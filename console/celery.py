"""The Celery application: ``celery --app console.celery worker`` and ``... beat``."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_process_init

from engine.process_guard import PARENT_PID, die_with_parent

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

app = Celery("console")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(["console"])


@worker_process_init.connect
def _guard_pool_process(**kwargs: Any) -> None:
    """A pool process ends with the worker that forked it, however that one ended."""
    os.environ[PARENT_PID] = str(os.getppid())
    die_with_parent("celery pool")

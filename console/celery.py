"""The Celery application: ``celery --app console.celery worker`` and ``... beat``."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from celery.signals import worker_process_init, worker_process_shutdown, worker_ready

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


@worker_process_shutdown.connect
def _leave_engine(**kwargs: Any) -> None:
    from console.link import close_process_link  # needs the app registry

    close_process_link()


@worker_ready.connect
def _reconcile_at_start(**kwargs: Any) -> None:
    """What the worker before this one left is looked at now, not at beat's next tick."""
    app.send_task("console.reconcile", expires=10)

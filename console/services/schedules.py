"""Scheduled control actions: beat's rows name an action, its fields and whose rights they use.

Path: django-celery-beat's table -> beat -> Celery -> here -> control.py. The rights are read when
the action runs, so a schedule of somebody who may no longer act is refused. A run whose predecessor
is still going, or ended a moment ago, is left out: a queue that piled up does not act in a burst.
"""

from __future__ import annotations

import datetime
import logging
from typing import Any

import msgspec
from django.contrib.auth.models import User
from django.utils import timezone

from console.auth import Forbidden, Principal, principal_of_user
from console.database import in_database
from console.fields import read_fields
from console.models import Job
from console.services import control
from engine.errors import NotFound

log = logging.getLogger(__name__)

ACT_TASK = "console.act"
BURST_S = 2.0


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """Keyword arguments of a periodic task ``console.act``: ``{"action": "flush_cache",
    "fields": {"timeout_s": 5}, "as_user": "admin", "reason": "nightly"}``."""

    action: str
    as_user: str
    fields: dict[str, Any] = {}
    reason: str = ""

    def require_own(self, username: str) -> None:
        """Raises ``Forbidden`` when it would act for somebody else."""
        if self.as_user != username:
            raise Forbidden(f"only a superuser may schedule an action for {self.as_user!r}")


async def act(given: dict[str, Any], *, message_id: str) -> Job | None:
    """The job once it has ended; None when the run was left out.

    ``message_id``: Celery's; a message that is delivered twice acts once. Raises ``Forbidden``.
    """
    schedule = read_fields(given, Schedule)
    principal = await in_database(_principal, schedule.as_user)
    if await in_database(_runs_now, principal, schedule):
        log.warning("scheduled %s is left out: the run before it is not over", schedule.action)
        return None
    return await control.perform(
        principal,
        schedule.action,
        schedule.fields,
        via="beat",
        reason=schedule.reason,
        key=f"beat {message_id}" if message_id else None,
    )


def _principal(name: str) -> Principal:
    user = User.objects.filter(username=name, is_active=True).first()
    if user is None:
        raise NotFound(f"the schedule acts for {name!r}, who has no account or may not sign in")
    return principal_of_user(user)


def _runs_now(principal: Principal, schedule: Schedule) -> bool:
    recent = timezone.now() - datetime.timedelta(seconds=BURST_S)
    same = Job.objects.filter(kind=schedule.action, actor=principal.actor, via="beat")
    running = same.exclude(state__in=Job.ENDED)
    return running.exists() or same.filter(ended_at__gte=recent).exists()

"""Jobs: every control action is one row, which is the truth and the queue at once.

A row changes hands by filtered UPDATEs alone (``JobQuerySet``), so two processes never own the same
job. ``version`` grows with each change: whoever follows jobs knows what it has seen.
"""

from __future__ import annotations

import datetime
from typing import Any

from django.db import models
from django.db.models.functions import Coalesce
from django.utils import timezone

LEASE_S = 15.0
RENEW_S = 5.0
HINT_LOST_S = 5.0  # a queued job that nobody took for so long: its hint was lost


class JobQuerySet(models.QuerySet["Job"]):
    def change(self, **fields: Any) -> int:
        """A filtered UPDATE; how many rows it changed."""
        return self.update(version=models.F("version") + 1, changed_at=timezone.now(), **fields)

    def owned(self, job: Job) -> JobQuerySet:
        """The row of ``job`` while it runs and still belongs to ``job.owner``."""
        return self.filter(pk=job.pk, owner=job.owner, state=Job.State.RUNNING)

    def orphans(self, now: datetime.datetime) -> JobQuerySet:
        """Running, but the lease of their owner is over."""
        return self.filter(state=Job.State.RUNNING, lease_until__lt=now)

    def waiting(self, now: datetime.datetime) -> JobQuerySet:
        """Queued for longer than a hint takes."""
        old = now - datetime.timedelta(seconds=HINT_LOST_S)
        return self.filter(state=Job.State.QUEUED, changed_at__lt=old)

    def take(self, job_id: int, owner: str, now: datetime.datetime) -> bool:
        """True for the one process that gets a queued or orphaned job."""
        free = models.Q(state=Job.State.QUEUED) | models.Q(
            state=Job.State.RUNNING, lease_until__lt=now
        )
        return bool(
            self.filter(free, pk=job_id).change(
                state=Job.State.RUNNING,
                owner=owner,
                lease_until=now + datetime.timedelta(seconds=LEASE_S),
                attempt=models.F("attempt") + 1,
                started_at=Coalesce("started_at", models.Value(now)),
            )
        )

    def changed_since(self, moment: datetime.datetime) -> JobQuerySet:
        return self.filter(changed_at__gte=moment).order_by("changed_at")

    def matching(self, *, state: str = "", kind: str = "", words: str = "") -> JobQuerySet:
        found = self
        if state:
            found = found.filter(state=state)
        if kind:
            found = found.filter(kind=kind)
        if words:
            found = found.filter(
                models.Q(title__icontains=words)
                | models.Q(actor__icontains=words)
                | models.Q(reason__icontains=words)
                | models.Q(message__icontains=words)
            )
        return found


class Job(models.Model):
    """``ranks`` are answers ``{dp, tp, state, message}``, ``events`` are ``{at, text}``.

    ``before`` and ``after`` are what the engine was before and after the action.
    """

    class State(models.TextChoices):
        QUEUED = "queued"
        RUNNING = "running"
        DONE = "done"
        PARTIAL = "partial"
        FAILED = "failed"
        REFUSED = "refused"

    ENDED = (State.DONE, State.PARTIAL, State.FAILED, State.REFUSED)

    key = models.CharField(max_length=64, unique=True, help_text="Idempotency key in the engine")
    kind = models.CharField(max_length=40, db_index=True)
    title = models.CharField(max_length=200)
    target = models.CharField(max_length=300, default="engine")
    state = models.CharField(max_length=8, choices=State, default=State.QUEUED, db_index=True)
    args = models.JSONField(default=dict, blank=True)

    actor = models.CharField(max_length=200)
    identity = models.CharField(max_length=64, blank=True)
    via = models.CharField(max_length=16)
    reason = models.CharField(max_length=500, blank=True)

    owner = models.CharField(max_length=64, blank=True)
    lease_until = models.DateTimeField(null=True, blank=True)
    attempt = models.PositiveIntegerField(default=0)

    progress = models.FloatField(null=True, blank=True)
    message = models.TextField(blank=True)
    status_code = models.PositiveIntegerField(default=0)
    result = models.JSONField(default=dict, blank=True)
    ranks = models.JSONField(default=list, blank=True)
    before = models.JSONField(default=dict, blank=True)
    after = models.JSONField(default=dict, blank=True)
    events = models.JSONField(default=list, blank=True)
    late = models.BooleanField(
        default=False, help_text="Written after the action: the database was away"
    )

    created_at = models.DateTimeField(default=timezone.now, db_index=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    changed_at = models.DateTimeField(default=timezone.now, db_index=True)
    version = models.PositiveIntegerField(default=1)

    objects = JobQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]

    def __str__(self) -> str:
        return f"{self.title} ({self.state})"

    @property
    def ended(self) -> bool:
        return self.state in self.ENDED

    def note(self, text: str) -> None:
        """One line of what happened; stored with the next change."""
        self.events = [*self.events, {"at": timezone.now().timestamp(), "text": text}]

"""What profiles and dumps share: a directory of files, who asked for them, and how far they are."""

from __future__ import annotations

import functools
import operator
from typing import Self, TypeVar

from django.db import models
from django.utils import timezone

Row = TypeVar("Row", bound="Recording", covariant=True)


class RecordingQuerySet(models.QuerySet[Row]):
    def matching(
        self, *, state: str = "", words: str = "", also: tuple[str, ...] = (), pinned: bool = False
    ) -> Self:
        """Those whose id, note, actor or reason holds ``words``, or a field of ``also``."""
        found = self.filter(state=state) if state else self
        if pinned:
            found = found.filter(pinned=True)
        if words:
            fields = ("recording_id", "note", "actor", "reason", *also)
            holds = [models.Q(**{f"{field}__icontains": words}) for field in fields]
            found = found.filter(functools.reduce(operator.or_, holds))
        return found


class Recording(models.Model):
    """``ranks`` is what each rank wrote, by its name: the engine's ``result["recorded"]``.

    ``missing`` are ranks that wrote nothing. ``pinned``: the disk quota leaves it alone.
    """

    class State(models.TextChoices):
        CAPTURING = "capturing"
        MERGING = "merging"
        READY = "ready"
        PARTIAL = "partial"
        FAILED = "failed"

    recording_id = models.CharField(max_length=128, unique=True)
    directory = models.CharField(max_length=500)
    state = models.CharField(max_length=10, choices=State, default=State.CAPTURING)
    message = models.TextField(blank=True)
    ranks = models.JSONField(default=dict, blank=True)
    missing = models.JSONField(default=list, blank=True)
    bytes = models.PositiveBigIntegerField(default=0)
    pinned = models.BooleanField(default=False)
    note = models.CharField(max_length=500, blank=True)
    actor = models.CharField(max_length=200)
    reason = models.CharField(max_length=500, blank=True)
    job = models.ForeignKey("console.Job", models.SET_NULL, null=True, blank=True, related_name="+")
    created_at = models.DateTimeField(default=timezone.now, db_index=True)

    class Meta:
        abstract = True
        ordering = ["-created_at", "-id"]

    def __str__(self) -> str:
        return self.recording_id

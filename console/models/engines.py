"""Engines that this console has met, and which weights each rank served when."""

from __future__ import annotations

import datetime

from django.db import models
from django.utils import timezone

SILENT_S = 30.0  # a spell that nobody confirmed for so long ended when it was last confirmed


class Engine(models.Model):
    """One row per engine home: where control actions are aimed. Its state is as last seen."""

    home = models.CharField(max_length=500, unique=True)
    model_path = models.CharField(max_length=500)
    state = models.CharField(max_length=20, blank=True)
    epoch = models.PositiveIntegerField(null=True, blank=True)
    weight_version = models.CharField(max_length=200, blank=True)
    token_step = models.BigIntegerField(null=True, blank=True)
    generation = models.PositiveIntegerField(default=0)
    first_seen_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.model_path.rsplit("/", 1)[-1] or self.home


class ServingQuerySet(models.QuerySet["Serving"]):
    def at(self, moment: datetime.datetime) -> ServingQuerySet:
        """The spells that cover ``moment``: one per rank that served."""
        silent = moment - datetime.timedelta(seconds=SILENT_S)
        return self.filter(started_at__lte=moment).filter(
            models.Q(ended_at__gt=moment) | models.Q(ended_at=None, confirmed_at__gte=silent)
        )

    def open(self) -> ServingQuerySet:
        return self.filter(ended_at=None)


class Serving(models.Model):
    """A spell in which one rank served one epoch, as its own heartbeats told."""

    engine = models.ForeignKey(Engine, on_delete=models.CASCADE, related_name="spells")
    dp = models.PositiveIntegerField()
    tp = models.PositiveIntegerField()
    epoch = models.PositiveIntegerField(db_index=True)
    pid = models.PositiveIntegerField()
    started_at = models.DateTimeField(db_index=True)
    confirmed_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = ServingQuerySet.as_manager()

    class Meta:
        ordering = ["-started_at"]
        constraints = [
            models.UniqueConstraint(
                fields=["engine", "dp", "tp"],
                condition=models.Q(ended_at=None),
                name="one_open_spell_per_rank",
            )
        ]

    def __str__(self) -> str:
        return f"dp{self.dp} tp{self.tp}: epoch {self.epoch}"

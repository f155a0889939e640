"""Checkpoints under the weight roots, and the lineage of what was served."""

from __future__ import annotations

from django.db import models
from django.utils import timezone


class Checkpoint(models.Model):
    """A safetensors file or directory; ``signature`` (mtime, bytes) tells when it changed."""

    class State(models.TextChoices):
        FOUND = "found"
        OK = "ok"
        INCOMPLETE = "incomplete"
        GONE = "gone"

    path = models.CharField(max_length=500, unique=True)
    state = models.CharField(max_length=10, choices=State, default=State.FOUND)
    message = models.TextField(blank=True)
    checksum = models.CharField(max_length=80, blank=True)
    tensors = models.PositiveIntegerField(default=0)
    bytes = models.PositiveBigIntegerField(default=0)
    signature = models.CharField(max_length=64, blank=True)
    token_step = models.BigIntegerField(null=True, blank=True)
    run = models.CharField(max_length=200, blank=True)
    note = models.CharField(max_length=500, blank=True)
    registered_by = models.CharField(max_length=200, blank=True)
    registered_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ["-registered_at", "-id"]

    def __str__(self) -> str:
        return self.path


class WeightUpdate(models.Model):
    """One update of weights, or an epoch that the engine made by itself (``job`` is empty).

    ``before`` and ``after``: epoch, version and step of the engine; ``groups``: the dp groups that
    took it, all ``[]`` when it failed.
    """

    class State(models.TextChoices):
        DONE = "done"
        PARTIAL = "partial"
        FAILED = "failed"
        REFUSED = "refused"

    epoch = models.PositiveIntegerField(null=True, blank=True, unique=True)
    state = models.CharField(max_length=8, choices=State, default=State.DONE)
    weight_version = models.CharField(max_length=200, blank=True)
    token_step = models.BigIntegerField(null=True, blank=True)
    source = models.CharField(max_length=500, blank=True)
    checksum = models.CharField(max_length=80, blank=True)
    policy = models.CharField(max_length=10, blank=True)
    groups = models.JSONField(default=list, blank=True)
    ranks = models.JSONField(default=list, blank=True)
    before = models.JSONField(default=dict, blank=True)
    after = models.JSONField(default=dict, blank=True)
    actor = models.CharField(max_length=200, blank=True)
    message = models.TextField(blank=True)
    at = models.DateTimeField(default=timezone.now, db_index=True)
    job = models.ForeignKey(
        "console.Job", null=True, blank=True, on_delete=models.SET_NULL, related_name="updates"
    )

    class Meta:
        ordering = ["-at", "-id"]

    def __str__(self) -> str:
        return f"{self.weight_version or 'weights'} ({self.state})"

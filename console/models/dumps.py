"""Dumps: one row per armed dump."""

from __future__ import annotations

from django.db import models

from console.models.recordings import Recording, RecordingQuerySet


class Dump(Recording):
    """``epoch`` and ``token_step`` are of the weights that served when it was armed; ``form`` is
    the numeric form that ran."""

    rids = models.JSONField(default=list, blank=True)
    tensors = models.PositiveIntegerField(default=0)
    form = models.CharField(max_length=100, blank=True)
    epoch = models.PositiveIntegerField(null=True, blank=True)
    token_step = models.BigIntegerField(null=True, blank=True)

    objects = RecordingQuerySet["Dump"].as_manager()

"""Profiles: one row per capture, with what its merge said."""

from __future__ import annotations

from django.db import models

from console.models.recordings import Recording, RecordingQuerySet


class Profile(Recording):
    """``merge`` is the merge's own result; times are in the unit that their name says."""

    steps = models.PositiveIntegerField(default=0)
    largest_gap_ms = models.FloatField(null=True, blank=True)
    merge = models.JSONField(default=dict, blank=True)

    objects = RecordingQuerySet["Profile"].as_manager()

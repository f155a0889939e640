"""API keys. The key itself is shown once and never stored; its SHA-256 digest is."""

from __future__ import annotations

import datetime
import hashlib

from django.conf import settings
from django.db import models
from django.utils import timezone


class ApiKeyQuerySet(models.QuerySet["ApiKey"]):
    def usable(self, now: datetime.datetime) -> ApiKeyQuerySet:
        """Neither revoked nor expired, and the owner, if any, may still sign in."""
        return (
            self.filter(revoked_at=None)
            .filter(models.Q(expires_at=None) | models.Q(expires_at__gt=now))
            .filter(models.Q(owner=None) | models.Q(owner__is_active=True))
        )


class ApiKey(models.Model):
    """A key of a program. 256 random bits need no slow hash."""

    name = models.CharField(max_length=100)
    prefix = models.CharField(max_length=16, help_text="First characters, to recognise the key")
    digest = models.CharField(max_length=64, unique=True, editable=False)
    scope_inference = models.BooleanField("inference", default=True)
    scope_control = models.BooleanField("control", default=False)
    owner = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        null=True,
        blank=True,
        on_delete=models.CASCADE,
        related_name="api_keys",
        help_text="Empty: made on the command line",
    )
    max_requests_per_minute = models.PositiveIntegerField(default=0, help_text="0: no limit")
    max_new_tokens = models.PositiveIntegerField(
        default=0, help_text="Longest answer of one request; 0: no limit"
    )
    created_at = models.DateTimeField(default=timezone.now, editable=False)
    expires_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)
    last_used_at = models.DateTimeField(null=True, blank=True, editable=False)

    may_revoke = False  # set for the page that shows the row

    objects = ApiKeyQuerySet.as_manager()

    class Meta:
        ordering = ["-created_at"]
        verbose_name = "API key"

    def __str__(self) -> str:
        return f"{self.name} ({self.prefix}...)"

    @staticmethod
    def digest_of(token: str) -> str:
        return hashlib.sha256(token.encode()).hexdigest()

    @property
    def scopes(self) -> list[str]:
        flags = {"inference": self.scope_inference, "control": self.scope_control}
        return [name for name, held in flags.items() if held]

    @property
    def state(self) -> str:
        """``usable``, ``expired`` or ``revoked``."""
        if self.revoked_at is not None:
            return "revoked"
        if self.expires_at is not None and self.expires_at <= timezone.now():
            return "expired"
        return "usable"

"""The audit: append-only, each entry carries the hash of the one before.

Guarded three times: these classes refuse to change or delete, triggers in the database refuse it as
well (``GUARDS``, migration 0004), and ``manage.py audit verify`` finds what went round both.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, NoReturn

from django.db import models
from django.utils import timezone

FIRST = "0" * 64


class AppendOnly(Exception):
    """Somebody tried to change or delete an audit entry: a mistake in our own code."""


class AuditQuerySet(models.QuerySet["AuditEntry"]):
    def update(self, **fields: Any) -> NoReturn:
        raise AppendOnly("audit entries are never changed")

    def delete(self) -> NoReturn:
        raise AppendOnly("audit entries are never deleted")

    def matching(self, *, actor: str = "", action: str = "", words: str = "") -> AuditQuerySet:
        found = self
        if actor:
            found = found.filter(actor=actor)
        if action:
            found = found.filter(action=action)
        if words:
            found = found.filter(
                models.Q(actor__icontains=words)
                | models.Q(action__icontains=words)
                | models.Q(target__icontains=words)
                | models.Q(reason__icontains=words)
                | models.Q(hash__startswith=words)
            )
        return found


class AuditEntry(models.Model):
    """Who did what, through what, and how it ended. ``job`` outlives the job's row."""

    at = models.DateTimeField(default=timezone.now, db_index=True)
    actor = models.CharField(max_length=200)
    identity = models.CharField(max_length=64, blank=True)
    via = models.CharField(max_length=16)
    action = models.CharField(max_length=40)
    target = models.CharField(max_length=300)
    result = models.CharField(max_length=8)
    reason = models.CharField(max_length=500, blank=True)
    job = models.PositiveBigIntegerField(null=True, blank=True)
    detail = models.JSONField(default=dict, blank=True)
    notice = models.CharField(
        max_length=64, null=True, blank=True, unique=True, help_text="Of a change by the engine"
    )
    previous = models.CharField(max_length=64)
    hash = models.CharField(max_length=64, unique=True)

    objects = AuditQuerySet.as_manager()

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "audit entries"

    def __str__(self) -> str:
        return f"{self.actor}: {self.action} {self.target}, {self.result}"

    def save(self, *args: Any, **options: Any) -> None:
        if not self._state.adding:
            raise AppendOnly("audit entries are never changed")
        super().save(*args, **options)

    def delete(self, *args: Any, **options: Any) -> NoReturn:
        raise AppendOnly("audit entries are never deleted")

    def digest(self) -> str:
        """SHA-256 over every field but ``hash``, as JSON with sorted keys."""
        content = {
            "previous": self.previous,
            "at": self.at.isoformat(),
            "actor": self.actor,
            "identity": self.identity,
            "via": self.via,
            "action": self.action,
            "target": self.target,
            "result": self.result,
            "reason": self.reason,
            "job": self.job,
            "detail": self.detail,
            "notice": self.notice,
        }
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


class AuditHead(models.Model):
    """The end of the chain, in one row: appending locks it, so entries never fork; its count and
    hash show entries that were cut off at the end."""

    count = models.PositiveBigIntegerField(default=0)
    hash = models.CharField(max_length=64, default=FIRST)

    def __str__(self) -> str:
        return f"{self.count} entries"


TABLE = "console_auditentry"
GUARDS = {
    "sqlite": [
        f"CREATE TRIGGER IF NOT EXISTS {TABLE}_no_{verb.lower()} BEFORE {verb} ON {TABLE} "
        f"BEGIN SELECT RAISE(ABORT, 'audit entries are append-only'); END"
        for verb in ("UPDATE", "DELETE")
    ],
    "postgresql": [
        f"CREATE OR REPLACE FUNCTION {TABLE}_refuse() RETURNS trigger AS $$ "
        f"BEGIN RAISE EXCEPTION 'audit entries are append-only'; END $$ LANGUAGE plpgsql",
        f"CREATE OR REPLACE TRIGGER {TABLE}_guard BEFORE UPDATE OR DELETE ON {TABLE} "
        f"FOR EACH ROW EXECUTE FUNCTION {TABLE}_refuse()",
    ],
}
UNGUARDS = {
    "sqlite": [f"DROP TRIGGER IF EXISTS {TABLE}_no_{verb}" for verb in ("update", "delete")],
    "postgresql": [f"DROP TRIGGER IF EXISTS {TABLE}_guard ON {TABLE}"],
}

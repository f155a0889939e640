"""The audit's verbs: append one entry, verify the chain, list, export."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from typing import Any

from django.db import transaction
from django.utils import timezone

from console.auth import Principal
from console.models import AuditEntry, AuditHead, Job
from console.models.audit import FIRST, AuditQuerySet

COLUMNS = (
    "id", "at", "actor", "via", "action", "target", "result", "reason", "job", "previous", "hash",
)  # fmt: skip


@transaction.atomic
def append(**fields: Any) -> AuditEntry:
    """One entry behind the last one. Within the caller's transaction: both are kept or neither."""
    head, _ = AuditHead.objects.select_for_update().get_or_create(pk=1)
    entry = AuditEntry(previous=head.hash, **fields)
    entry.hash = entry.digest()
    entry.save(force_insert=True)
    AuditHead.objects.filter(pk=head.pk).update(count=head.count + 1, hash=entry.hash)
    return entry


def note_job(job: Job) -> AuditEntry:
    """How a job ended."""
    return append(
        at=job.ended_at or timezone.now(),
        actor=job.actor,
        identity=job.identity,
        via=job.via,
        action=job.kind,
        target=job.target,
        result=job.state,
        reason=job.reason,
        job=job.pk,
        detail={"args": job.args, "message": job.message, "before": job.before,
                "after": job.after},
    )  # fmt: skip


def note_denied(principal: Principal, *, action: str, via: str, why: str) -> None:
    """Somebody tried what their rights do not allow."""
    append(
        actor=principal.actor,
        identity=principal.identity,
        via=via,
        action=action,
        target="engine",
        result="denied",
        detail={"message": why},
    )


def note_change(*, notice: str, at: Any, action: str, text: str) -> bool:
    """Something that the engine did by itself; False when another worker wrote it down before."""
    with transaction.atomic():
        AuditHead.objects.select_for_update().get_or_create(pk=1)
        if AuditEntry.objects.filter(notice=notice).exists():
            return False
        append(
            at=at, actor="engine", via="engine", action=action, target="engine", result="done",
            detail={"message": text}, notice=notice,
        )  # fmt: skip
    return True


# ---------------------------------------------------------------- verification


@dataclass(frozen=True, slots=True)
class Verdict:
    """``broken_at``: id of the first entry that does not fit; ``problem`` says how."""

    entries: int
    broken_at: int | None = None
    problem: str = ""

    @property
    def ok(self) -> bool:
        return not self.problem


def verify() -> Verdict:
    """Walks the chain: content against hash, hash against the next entry, its end against head."""
    previous, count = FIRST, 0
    for entry in AuditEntry.objects.order_by("id").iterator(chunk_size=1000):
        count += 1
        if entry.previous != previous:
            return Verdict(count, entry.pk, f"an entry before {entry.pk} is missing or was changed")
        if entry.digest() != entry.hash:
            return Verdict(count, entry.pk, f"entry {entry.pk} was changed")
        previous = entry.hash
    head = AuditHead.objects.filter(pk=1).first() or AuditHead()
    if (head.count, head.hash) != (count, previous):
        return Verdict(
            count, None, f"the chain ends after {count} entries, {head.count} were written"
        )
    return Verdict(count)


# ---------------------------------------------------------------- reading


def page(*, offset: int, size: int, **filters: str) -> dict[str, Any]:
    rows = list(AuditEntry.objects.matching(**filters)[offset : offset + size + 1])
    return {
        "entries": [as_json(row) for row in rows[:size]],
        "next": offset + size if len(rows) > size else None,
    }


def as_json(entry: AuditEntry) -> dict[str, Any]:
    """Times are seconds since the Unix epoch."""
    return {
        "id": entry.pk,
        "at": entry.at.timestamp(),
        "actor": entry.actor,
        "via": entry.via,
        "action": entry.action,
        "target": entry.target,
        "result": entry.result,
        "reason": entry.reason,
        "job": entry.job,
        "detail": entry.detail,
        "previous": entry.previous,
        "hash": entry.hash,
    }


def as_list(entries: AuditQuerySet) -> list[dict[str, Any]]:
    """Oldest first, with everything that the hashes cover."""
    return [as_json(entry) for entry in entries.order_by("id").iterator(chunk_size=1000)]


def as_csv(entries: AuditQuerySet) -> str:
    """All ``COLUMNS``, oldest first; cells that a spreadsheet would run as a formula are quoted."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(COLUMNS)
    for entry in entries.order_by("id").iterator(chunk_size=1000):
        writer.writerow([_cell(getattr(entry, name)) for name in COLUMNS])
    return file.getvalue()


def _cell(value: Any) -> str:
    text = "" if value is None else value.isoformat() if hasattr(value, "isoformat") else str(value)
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text

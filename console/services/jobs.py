"""Job rows: stored, taken, renewed, ended, listed. Every change of state is a filtered UPDATE.

The row, its audit entry and its effects on other tables are one transaction; hints go out after it.
"""

from __future__ import annotations

import copy
import datetime
import os
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from console import events
from console.auth import Principal
from console.models import Job
from console.models.jobs import LEASE_S
from console.services import audit, catalogue, effects
from console.services.actions import Action
from console.worker import this_worker
from engine.errors import Conflict, NotFound

OUTCOME_FIELDS = (
    "state", "title", "message", "status_code", "progress", "result", "ranks", "after", "events",
    "ended_at",
)  # fmt: skip


def owner_name() -> str:
    """This process, as it owns jobs."""
    return f"{this_worker().id}:{os.getpid()}"


def new_job(
    principal: Principal, action: Action, *, key: str, via: str, reason: str, before: dict[str, Any]
) -> Job:
    """A row that is not stored yet."""
    return Job(
        key=key,
        kind=action.name,
        title=action.title[:200],
        target=action.aim[:300],
        args=action.args,
        actor=principal.actor,
        identity=principal.identity,
        via=via,
        reason=reason[:500],
        before=before,
    )


def claim(job: Job) -> None:
    """This process runs the job from its first moment."""
    job.state, job.owner, job.attempt = Job.State.RUNNING, owner_name(), 1
    job.started_at, job.lease_until = job.created_at, lease_end()
    job.note("taken")


def lease_end() -> datetime.datetime:
    return timezone.now() + datetime.timedelta(seconds=LEASE_S)


# ---------------------------------------------------------------- changes


def insert(job: Job) -> tuple[Job, bool]:
    """The stored row and True; the older job and False when its key is known.

    Works on a copy: the caller may have given up waiting and gone on with ``job``. Raises
    ``Conflict`` when the key was used for another action.
    """
    row = copy.copy(job)
    try:
        with transaction.atomic():
            row.save(force_insert=True)
            effects.begun(row)
            _tell(row)
            if row.state == Job.State.QUEUED:
                events.enqueue_on_commit(effects.RUN_TASK, row.pk)
    except IntegrityError:
        known = Job.objects.get(key=job.key)
        if (known.kind, _asked(known)) != (job.kind, _asked(job)):
            raise Conflict(
                f"this key was used for job {known.pk} ({known.title}); use another one",
                err_type="key_reused",
            ) from None
        return known, False
    return row, True


def _asked(job: Job) -> dict[str, Any]:
    """The arguments as the caller gave them."""
    derived = catalogue.find(job.kind).derived
    return {name: value for name, value in job.args.items() if name not in derived}


def take(job_id: int) -> Job | None:
    """The job, when this process got it: it was queued, or its owner's lease is over."""
    if not Job.objects.all().take(job_id, owner_name(), timezone.now()):
        return None
    job = Job.objects.get(pk=job_id)
    _tell_now(job)
    return job


def renew(job: Job) -> bool:
    """False when the job is not this owner's any more."""
    return bool(Job.objects.owned(job).update(lease_until=lease_end()))


def progress(job: Job) -> bool:
    """Stores message, progress, events and what the engine said so far of a running job."""
    with transaction.atomic():
        changed = Job.objects.owned(job).change(
            message=job.message,
            progress=job.progress,
            result=job.result,
            events=job.events,
            lease_until=lease_end(),
        )
        _tell(job)
    return bool(changed)


def hand_over(job: Job) -> None:
    """This owner leaves: whoever looks next may take it at once."""
    Job.objects.owned(job).update(lease_until=timezone.now())


@transaction.atomic
def finish(job: Job) -> bool:
    """Ends a job with its audit entry; False when another owner has it or ended it before."""
    job.ended_at = job.ended_at or timezone.now()
    if job.pk is None and not _insert_late(job):
        return False
    fields = {name: getattr(job, name) for name in OUTCOME_FIELDS}
    if not job.late and not Job.objects.owned(job).change(**fields, lease_until=None):
        return False
    effects.ended(job)
    audit.note_job(job)
    _tell(job)
    return True


def _insert_late(job: Job) -> bool:
    """A job that could not be stored when it began; False when it was stored after all."""
    if known := Job.objects.filter(key=job.key).first():
        job.pk, job.late = known.pk, False
        job.owner = known.owner
        return not known.ended
    job.late = True
    job.lease_until = None
    job.note("written down late: the database was away")
    job.save(force_insert=True)
    effects.begun(job)
    return True


def _tell(job: Job) -> None:
    assert job.pk is not None
    events.publish_on_commit(events.JobChanged(job_id=job.pk))


def _tell_now(job: Job) -> None:
    with transaction.atomic():
        _tell(job)


# ---------------------------------------------------------------- reading


def by_id(job_id: int) -> Job:
    job = Job.objects.filter(pk=job_id).first()
    if job is None:
        raise NotFound(f"there is no job {job_id}")
    return job

"""What a job's begin and end change in other tables, in the same transaction.

Everything is decided by the row alone, since a job may end in another process than it began.
"""

from __future__ import annotations

import uuid
from typing import Any

from console import events
from console.models import Job, WeightUpdate
from console.services import catalogue, checkpoints, dumps, profiles
from console.services.file_actions import RegisterCheckpoint
from console.services.recording_actions import DumpTensors, MergeProfile, Profile
from console.services.weight_actions import Relabel, Update

RUN_TASK = "console.run_job"


def begun(job: Job) -> None:
    if job.kind == RegisterCheckpoint.name:
        action = RegisterCheckpoint.read(job.args)
        checkpoints.register(action, actor=job.actor)
    elif job.kind == Profile.name:
        profiles.begun(Profile.read(job.args), job)
    elif job.kind == DumpTensors.name:
        dumps.begun(DumpTensors.read(job.args), job)


def ended(job: Job) -> None:
    if job.kind == RegisterCheckpoint.name:
        checkpoints.note_read(RegisterCheckpoint.read(job.args).path, job)
    elif job.kind == Profile.name:
        _profiled(Profile.read(job.args), job)
    elif job.kind == MergeProfile.name:
        profiles.merged(MergeProfile.read(job.args).recording_id, job)
    elif job.kind == DumpTensors.name:
        dumps.ended(DumpTensors.read(job.args), job)
    elif job.kind == Relabel.name:
        _relabel(job)
    elif "epoch" in job.result or _failed_update(job):
        _note_update(job)


def _profiled(action: Profile, job: Job) -> None:
    """What was written is merged by a job of its own, which Celery does."""
    if not profiles.ended(action, job):
        return
    merge = MergeProfile(recording_id=action.recording_id, directory=str(action.directory))
    row = Job.objects.create(
        key=uuid.uuid4().hex,
        kind=merge.name,
        title=merge.title[:200],
        target=merge.aim[:300],
        args=merge.args,
        actor=job.actor,
        identity=job.identity,
        via=job.via,
        reason=job.reason,
    )
    events.publish_on_commit(events.JobChanged(job_id=row.pk))
    events.enqueue_on_commit(RUN_TASK, row.pk)


def _relabel(job: Job) -> None:
    if job.state == Job.State.DONE:
        epoch, version = job.result["epoch"], job.result["new_version"]
        WeightUpdate.objects.filter(epoch=epoch).update(weight_version=version)


def _failed_update(job: Job) -> bool:
    """Steps of a session that went well are no update of their own; what failed is one."""
    kind = catalogue.find(job.kind)
    updates = issubclass(kind, Update) and kind.updates
    return updates and job.state in (Job.State.FAILED, Job.State.REFUSED)


def _note_update(job: Job) -> None:
    """The lineage row of an update: what, from where, by whom, before and after."""
    action = catalogue.find(job.kind).read(job.args)
    update = action if isinstance(action, Update) else None
    result = job.result
    fields: dict[str, Any] = {
        "state": job.state,
        "weight_version": result.get("weight_version") or (update and update.weight_version) or "",
        "token_step": result.get("token_step", update.token_step if update else None),
        "source": update.source if update else "session",
        "checksum": result.get("checksum", ""),
        "policy": result.get("in_flight") or (update.policy if update else ""),
        "groups": sorted({rank["dp"] for rank in job.ranks}) if "epoch" in result else [],
        "ranks": job.ranks,
        "before": job.before,
        "after": job.after,
        "actor": job.actor,
        "message": job.message,
        "at": result.get("committed_at") or job.ended_at,
        "job": job,
    }
    if "epoch" in result:
        WeightUpdate.objects.update_or_create(epoch=result["epoch"], defaults=fields)
    else:
        WeightUpdate.objects.create(**fields)


def links(job: Job) -> list[dict[str, str]]:
    """Where the result of a job can be seen."""
    if job.result.get("epoch"):
        return [{"label": "Weights", "url": "/weights/"}]
    if job.kind in (Profile.name, MergeProfile.name) and "recording_id" in job.args:
        name = job.args["recording_id"]
        return [{"label": f"Profile {name}", "url": f"/profiles/{name}/"}]
    if job.kind == DumpTensors.name and "recording_id" in job.args:
        name = job.args["recording_id"]
        return [{"label": f"Dump {name}", "url": f"/dumps/{name}/"}]
    return []

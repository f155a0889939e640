"""Jobs that ended while the database was away: one small file each, read in once it is back.

Any process may write one, ``reconcile`` of any process reads them, so nothing depends on the
process that acted. A file appears whole (rename) and goes once its job's transaction is through.
"""

from __future__ import annotations

import datetime
import logging
import os
from pathlib import Path
from typing import Any

import msgspec
from django.conf import settings
from django.db import IntegrityError

from console.models import Job
from console.services import jobs

log = logging.getLogger(__name__)

FIELDS = (
    "key", "kind", "title", "target", "state", "args", "actor", "identity", "via", "reason",
    "message", "status_code", "result", "ranks", "before", "after", "events",
    "created_at", "started_at", "ended_at",
)  # fmt: skip
TIMES = ("created_at", "started_at", "ended_at")


def directory() -> Path:
    return settings.QUARTERDECK_HOME / "late-jobs"


def put(job: Job) -> None:
    """Keeps an ended job until the database is back."""
    directory().mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory() / f"{job.key}.json"
    draft = path.with_suffix(".new")
    with open(draft, "wb") as file:
        file.write(msgspec.json.encode({name: getattr(job, name) for name in FIELDS}))
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, path)
    log.warning("job %s (%s) is written down later: the database is away", job.key, job.title)


def read_in() -> int:
    """Stores what waits; how many jobs it was."""
    count = 0
    for path in sorted(directory().glob("*.json")):
        job = _job_of(path)
        try:
            if job is not None and jobs.finish(job):
                count += 1
        except IntegrityError:
            continue  # another process stores it in this moment; the next round finds it stored
        path.unlink(missing_ok=True)
    return count


def _job_of(path: Path) -> Job | None:
    try:
        fields: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None  # another process was first
    for name in TIMES:
        if fields[name] is not None:
            fields[name] = datetime.datetime.fromisoformat(fields[name])
    return Job(**fields)

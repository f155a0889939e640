"""What profiles and dumps share in the console: rows found, pinned, deleted, their files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from django.conf import settings
from django.db import models, transaction

from console.models import Dump, Job, Profile
from console.services.disk import PIN
from console.services.recording_actions import Record
from engine.errors import BadRequest, Conflict, NotFound

Row = TypeVar("Row", Profile, Dump)


def begun(kind: type[Row], action: Record, job: Job, **more: Any) -> Row:
    """The row of a recording that was taken. Conflict if its name was used before."""
    if kind.objects.filter(recording_id=action.recording_id).exists():
        raise Conflict(f"there is a {action.kind} {action.recording_id} already")
    return kind.objects.create(
        recording_id=action.recording_id,
        directory=str(action.directory),
        actor=job.actor,
        reason=job.reason,
        note=action.note,
        job=job,
        **more,
    )


def note_ended(row: Row, job: Job, state: str) -> bool:
    """What the engine said in the end; False if nothing was recorded. The caller saves."""
    recorded = job.result.get("recorded")
    if recorded is None:
        if job.state == Job.State.REFUSED:
            row.delete()
            return False
        row.state, row.message = row.State.FAILED, job.message
        return False
    row.ranks, row.missing = recorded, job.result.get("missing", [])
    row.message = job.message
    whole = job.state == Job.State.DONE
    row.state = row.State.FAILED if job.state == Job.State.FAILED else (
        state if whole else row.State.PARTIAL
    )  # fmt: skip
    return job.state != Job.State.FAILED


def by_name(kind: type[Row], name: str) -> Row:
    found = kind.objects.filter(recording_id=name).first()
    if found is None:
        raise NotFound(f"there is no {kind.__name__.lower()} {name}")
    return found


def page(
    rows: models.QuerySet[Any], as_json: Callable[[Any], Any], *, name: str, offset: int, size: int
) -> dict[str, Any]:
    found = list(rows[offset : offset + size + 1])
    return {
        name: [as_json(row) for row in found[:size]],
        "next": offset + size if len(found) > size else None,
    }


@transaction.atomic
def change(row: Profile | Dump, *, pinned: bool | None, note: str | None) -> None:
    """Pin or note. The pin is a file beside the directory: the disk quota reads that."""
    if note is not None:
        row.note = note[:500]
    if pinned is not None:
        row.pinned = pinned
        directory = Path(row.directory)
        if pinned and directory.is_dir():
            (directory / PIN).touch()
        elif not pinned:
            (directory / PIN).unlink(missing_ok=True)
    row.save(update_fields=["note", "pinned"])


def delete(row: Profile | Dump) -> None:
    """The row and its files; those of others in the same directory stay."""
    if row.state == row.State.CAPTURING:
        raise Conflict(f"{row} is still being written: stop it first")
    if row.pinned:
        raise Conflict(f"{row} is pinned")
    directory = Path(row.directory)
    if _alone(row):
        shutil.rmtree(directory, ignore_errors=True)
    else:
        for path in files_of(row):
            path.unlink(missing_ok=True)
    row.delete()


def expired(row: Profile | Dump) -> bool:
    """Whether its files made room for others."""
    return row.state != row.State.CAPTURING and not Path(row.directory).is_dir()


def _alone(row: Profile | Dump) -> bool:
    """Whether the directory was made for this recording, and no other has written below it."""
    directory = Path(row.directory)
    below = models.Q(directory=row.directory) | models.Q(directory__startswith=f"{directory}/")
    others = type(row).objects.exclude(pk=row.pk).filter(below)
    home = Path(settings.QUARTERDECK_HOME).resolve()
    made = directory.name == row.recording_id and home in directory.parent.parents
    return made and not others.exists()


def files_of(row: Profile | Dump) -> list[Path]:
    """Files of this recording and no other: its id is followed by '-' or '.', or stands in a
    name of the merge."""
    directory, name = Path(row.directory), row.recording_id
    if not directory.is_dir():
        return []
    ours = (f"{name}-dp", f"{name}.", f"merged-{name}.", f"summary-{name}.")
    return sorted(path for path in directory.iterdir() if path.name.startswith(ours))


def file_named(row: Profile | Dump, name: str) -> Path:
    for path in files_of(row):
        if path.name == name:
            return path
    raise NotFound(f"{row} has no file {name}")


def place_of(rank: str) -> tuple[int, int]:
    """``dp1-tp0`` -> (1, 0)."""
    parts = rank.split("-")
    try:
        return int(parts[0].removeprefix("dp")), int(parts[1].removeprefix("tp"))
    except (IndexError, ValueError):
        raise BadRequest(f"{rank!r} is no rank") from None

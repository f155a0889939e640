"""Checkpoints: found under the weight roots, or registered by a trainer; checked by a job.

A path is read once for its checksum and again only when its files changed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgspec

from console.models import Checkpoint, Job
from console.services import roots
from console.services.file_actions import RegisterCheckpoint
from console.services.weight_actions import ReloadWeights

DEPTH = 4  # of directories below a root
QUIET_S = 5.0  # what changed more recently may still be being written
NOT_WEIGHTS = frozenset({"spool", ".git", "__pycache__"})


def signature_of(path: Path) -> tuple[str, int]:
    """(newest mtime and total bytes as a text, bytes) of the safetensors at ``path``."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    stats = [file.stat() for file in files]
    size = sum(stat.st_size for stat in stats)
    newest = max((stat.st_mtime_ns for stat in stats), default=0)
    return f"{newest}:{size}", size


def register(action: RegisterCheckpoint, *, actor: str) -> Checkpoint:
    """What a trainer says of a path; its files are checked by the job that registers it.

    What was read before and did not change since stays ready meanwhile.
    """
    signature, size = signature_of(Path(action.path))
    told = {"token_step": action.token_step, "run": action.run, "note": action.note}
    said = {name: value for name, value in told.items() if value not in (None, "")}
    checkpoint, new = Checkpoint.objects.get_or_create(
        path=action.path,
        defaults={"signature": signature, "bytes": size, "registered_by": actor, **said},
    )
    if new:
        return checkpoint
    if checkpoint.signature != signature or checkpoint.state == Checkpoint.State.GONE:
        said |= {"signature": signature, "bytes": size, "state": Checkpoint.State.FOUND}
    Checkpoint.objects.filter(pk=checkpoint.pk).update(**said)
    return checkpoint


def note_read(path: str, job: Job) -> None:
    """The outcome of the job that read it."""
    result: dict[str, Any] = job.result
    if job.state == Job.State.DONE:
        Checkpoint.objects.filter(path=path).update(
            state=Checkpoint.State.OK,
            message="",
            checksum=result.get("checksum", ""),
            tensors=result.get("tensors", 0),
            bytes=result.get("bytes", 0),
        )
    else:
        Checkpoint.objects.filter(path=path).update(
            state=Checkpoint.State.INCOMPLETE, message=job.message
        )


def with_step(action: ReloadWeights) -> ReloadWeights:
    """With the trainer's step that was registered for its path, unless it names one."""
    if action.token_step is not None:
        return action
    known = Checkpoint.objects.filter(path=action.model_path).first()
    step = known.token_step if known else None
    return msgspec.structs.replace(action, token_step=step)


def listed() -> list[dict[str, Any]]:
    """As the Weights page shows them, newest first."""
    return [as_json(row) for row in Checkpoint.objects.exclude(state=Checkpoint.State.GONE)[:500]]


def as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "id": checkpoint.pk,
        "path": roots.shown(checkpoint.path),
        "token_step": checkpoint.token_step,
        "run": checkpoint.run,
        "note": checkpoint.note,
        "bytes": checkpoint.bytes,
        "tensors": checkpoint.tensors,
        "checksum": checkpoint.checksum,
        "registered_at": checkpoint.registered_at.timestamp(),
        "registered_by": checkpoint.registered_by,
        "state": checkpoint.state,
        "message": checkpoint.message,
    }


# ---------------------------------------------------------------- discovery


def discover() -> list[str]:
    """Paths that are new or changed and ought to be read; those that vanished are marked gone."""
    quiet = time.time() - QUIET_S
    found = {
        str(path): signature_of(path)[0]
        for path in _walk_roots()
        if all(file.stat().st_mtime < quiet for file in path.glob("*.safetensors"))
    }
    known = dict(Checkpoint.objects.values_list("path", "signature"))
    gone = [path for path in known if not os.path.exists(path)]
    Checkpoint.objects.filter(path__in=gone).update(state=Checkpoint.State.GONE)
    return [path for path, signature in found.items() if known.get(path) != signature]


def _walk_roots() -> set[Path]:
    """Directories that hold safetensors directly, below any root."""
    found: set[Path] = set()
    for root in roots.weight_roots():
        for directory, names, files in os.walk(root):
            depth = len(Path(directory).relative_to(root).parts)
            names[:] = [] if depth >= DEPTH else sorted(set(names) - NOT_WEIGHTS)
            if any(name.endswith(".safetensors") for name in files):
                found.add(Path(directory))
    return found

"""The file that says which ranks a profile or a dump expects: written first, by the router.

Path: recordings.py -> process.py -> here -> profiling/manifest.py, dumps/store.py.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from engine.artifacts import Rank
from engine.config import EngineConfig
from engine.messages import RecordingKind
from engine.profiling.manifest import ProfileFile, write_profile


def open_recording(
    config: EngineConfig, kind: RecordingKind, directory: Path, recording_id: str
) -> None:
    """Makes ``directory`` and writes the file. OSError if it cannot be written."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ranks = [Rank(dp=dp, tp=tp) for dp in range(config.dp) for tp in range(config.tp)]
    now = time.time()
    if kind == "profile":
        profile = ProfileFile(profile_id=recording_id, ranks=ranks, created_at=now)
        write_profile(directory, profile)
    else:
        from engine.dumps.store import DumpFile, write_dump  # numpy

        write_dump(directory, DumpFile(dump_id=recording_id, ranks=ranks, created_at=now))


def drop_recording(kind: RecordingKind, directory: Path, recording_id: str) -> None:
    """Removes the file, and the directory if nothing else is in it."""
    with suppress(OSError):
        (directory / f"{recording_id}.{kind}.json").unlink()
        directory.rmdir()

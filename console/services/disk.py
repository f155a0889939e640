"""One quota for what Quarterdeck writes by itself: spools, profiles, dumps.

Before a large write ``make_room`` deletes the oldest items until quota and disk have room for it;
pinned items stay, and so do spools, which the engine deletes when no epoch needs them. An item is a
file or a directory; it is pinned by a file ``.pinned`` in it, or ``NAME.pinned`` beside it.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from django.conf import settings

from engine.errors import QuarterdeckError

log = logging.getLogger(__name__)

SPARE_BYTES = 256 * 2**20  # always left free on the disk
YOUNG_S = 60.0  # an item that changed more recently may still be being written
PIN = ".pinned"


class NoSpace(QuarterdeckError):
    status_code = 507
    err_type = "no_space"


@dataclass(frozen=True, slots=True)
class Kind:
    """``directory`` below the home; ``deletable``: its old items make room for others."""

    name: str
    directory: str
    deletable: bool


KINDS = (
    Kind("spools", "spool", deletable=False),
    Kind("profiles", "profiles", deletable=True),
    Kind("dumps", "dumps", deletable=True),
)


@dataclass(frozen=True, slots=True)
class Item:
    kind: Kind
    path: Path
    bytes: int
    changed_at: float

    @property
    def pinned(self) -> bool:
        inside = self.path / PIN if self.path.is_dir() else None
        beside = self.path.with_name(self.path.name + PIN)
        return beside.exists() or (inside is not None and inside.exists())


def quota_bytes() -> int:
    return int(settings.QUARTERDECK_DISK_QUOTA_GB * 10**9)


def items() -> list[Item]:
    """Everything that counts, oldest first."""
    found = [
        _item(kind, path)
        for kind in KINDS
        for path in _entries(settings.QUARTERDECK_HOME / kind.directory)
    ]
    return sorted((item for item in found if item is not None), key=lambda item: item.changed_at)


def _entries(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if not path.name.endswith(PIN)]


def _item(kind: Kind, path: Path) -> Item | None:
    """None when it vanished meanwhile."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    try:
        stats = [file.stat() for file in files] or [path.stat()]
    except FileNotFoundError:
        return None
    return Item(kind, path, sum(s.st_size for s in stats), max(s.st_mtime for s in stats))


def usage() -> dict[str, Any]:
    """Bytes per kind, the quota, and what the disk has left."""
    found = items()
    return {
        "quota_bytes": quota_bytes(),
        "used_bytes": sum(item.bytes for item in found),
        "free_bytes": shutil.disk_usage(settings.QUARTERDECK_HOME).free,
        "kinds": {
            kind.name: {
                "bytes": sum(item.bytes for item in found if item.kind is kind),
                "items": sum(item.kind is kind for item in found),
                "pinned": sum(item.kind is kind and item.pinned for item in found),
            }
            for kind in KINDS
        },
    }


def make_room(wanted_bytes: int) -> list[str]:
    """Deletes the oldest until ``wanted_bytes`` fit; the paths that went. Raises ``NoSpace``."""
    found = items()
    used = sum(item.bytes for item in found)
    free = shutil.disk_usage(settings.QUARTERDECK_HOME).free
    over = max(used + wanted_bytes - quota_bytes(), wanted_bytes + SPARE_BYTES - free)
    young = time.time() - YOUNG_S
    gone: list[str] = []
    for item in found:
        if over <= 0:
            break
        if item.kind.deletable and item.changed_at < young and not item.pinned:
            _delete(item)
            over -= item.bytes
            gone.append(str(item.path))
    if over > 0:
        raise NoSpace(
            f"{wanted_bytes} bytes do not fit: {over} are missing of the quota of "
            f"{quota_bytes()} bytes (QUARTERDECK_DISK_QUOTA_GB) or of the disk; "
            "unpin or delete profiles and dumps"
        )
    return gone


def _delete(item: Item) -> None:
    """Renamed first, so that nobody meets half of it."""
    doomed = item.path.with_name(f".{item.path.name}.deleted-{os.getpid()}")
    try:
        os.replace(item.path, doomed)
    except FileNotFoundError:
        return
    if doomed.is_dir():
        shutil.rmtree(doomed)
    else:
        doomed.unlink()
    log.info("deleted %s (%d bytes) for the disk quota", item.path, item.bytes)


def tidy() -> dict[str, Any]:
    """Brings the home below its quota; what it did, as a job's result."""
    gone = make_room(0)
    return {"deleted": gone, **usage()}

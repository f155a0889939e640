"""What profiles and dumps share: names of ranks, safe ids and paths, files that appear whole.

Path: profiling/*, dumps/* -> here.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

import msgspec

from engine.errors import BadRequest

ARTIFACT_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class Rank(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """Place of one rank. Field order is display order: DP outermost, then EP, PP, TP."""

    dp: int = 0
    ep: int | None = None
    pp: int | None = None
    tp: int = 0

    @property
    def name(self) -> str:
        """``dp0-tp1``, with ``-pp2`` and ``-ep3`` where the engine has those axes."""
        more = "".join(
            f"-{axis}{at}" for axis in ("pp", "ep") if (at := getattr(self, axis)) is not None
        )
        return f"dp{self.dp}-tp{self.tp}{more}"

    @property
    def label(self) -> str:
        """``[TP01-DP00]``, as SGLang labels the processes of a merged trace."""
        axes = [("TP", self.tp), ("DP", self.dp), ("PP", self.pp), ("EP", self.ep)]
        return "[" + "-".join(f"{axis}{at:02d}" for axis, at in axes if at is not None) + "]"

    @property
    def order(self) -> tuple[int, int, int, int]:
        return (self.dp, self.ep or 0, self.pp or 0, self.tp)


def check_id(artifact_id: str) -> str:
    """The id itself; BadRequest if it could name a file elsewhere."""
    if not ARTIFACT_ID.fullmatch(artifact_id):
        raise BadRequest(
            f"id {artifact_id!r} may hold up to 128 letters, digits, '.', '_' and '-', and may not "
            "begin with '.' or '-'"
        )
    return artifact_id


def confined(directory: Path, name: str) -> Path:
    """The file ``name`` of the directory; BadRequest if it points out of it."""
    root = directory.resolve()
    path = (root / name).resolve()
    if not path.is_relative_to(root) or path == root:
        raise BadRequest(f"{name!r} is not a file inside {directory.name}")
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """All of ``content`` or the file as it was; never a part. OSError if it cannot be written."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as out:
        try:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise

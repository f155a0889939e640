"""Lines up the pieces of all ranks as one gzip member, metadata events first.

Path: part.py's pieces -> here -> ``merged-<id>.trace.json.gz``.

A piece is raw deflate data that ends on a byte border without a final block, so pieces can stand
one behind the other as one member; its checksum is combined from theirs. One member, since browsers
refuse a gzip file of several (the Compression Streams standard calls that an error).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from isal import isal_zlib

from engine.artifacts import Rank
from engine.errors import Conflict
from engine.profiling.part import LEVEL, PIDS_PER_RANK, RAW_DEFLATE, Lane, PartResult, Process

GZIP_HEADER = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"  # no name, no time: same in, same out


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One rank's events in ``out``; ``note`` stands behind the names of its processes."""

    rank: Rank
    note: str
    start_ns: int
    out: BinaryIO
    result: PartResult


class GzipJoin:
    """Writes one gzip member out of texts and finished deflate pieces."""

    def __init__(self, out: BinaryIO) -> None:
        self._out = out
        self._crc = 0
        self._length = 0
        out.write(GZIP_HEADER)

    def text(self, plain: bytes) -> None:
        compressor = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW_DEFLATE)
        self._out.write(compressor.compress(plain))
        self._out.write(compressor.flush(isal_zlib.Z_FULL_FLUSH))
        self._add(isal_zlib.crc32(plain), len(plain))

    def piece(self, deflated: BinaryIO, crc: int, length: int) -> None:
        deflated.seek(0)
        shutil.copyfileobj(deflated, self._out, 256 * 1024)
        self._add(crc, length)

    def close(self) -> None:
        compressor = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW_DEFLATE)
        self._out.write(compressor.flush())
        self._out.write(struct.pack("<II", self._crc, self._length & 0xFFFFFFFF))

    def _add(self, crc: int, length: int) -> None:
        self._crc = isal_zlib.crc32_combine(self._crc, crc, length)
        self._length += length


@contextmanager
def atomic_output(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the name ``path`` when the block ends well, and vanishes otherwise.

    Conflict while another process writes the same. What a killed writer left is overwritten.
    """
    partial = path.with_name(f".{path.name}.part")
    with partial.open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_at(out, partial):
                raise BlockingIOError
        except BlockingIOError as error:
            raise Conflict(f"{path.name} is being written by another process") from error
        out.truncate(0)
        try:
            yield out
            out.flush()
            os.fsync(out.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink()
            raise


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Whether ``path`` still names the open ``file``: its writer may have renamed it meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def write_document(out: BinaryIO, pieces: list[Piece], about: dict[str, Any]) -> None:
    """The merged trace, with ``about`` in it as ``quarterdeck``. OSError if the disk is full."""
    join = GzipJoin(out)
    envelope = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": pieces[0].start_ns,
        "deviceProperties": _device_properties(pieces),
        "quarterdeck": about | {"traces": {p.rank.name: p.result.envelope for p in pieces}},
    }
    join.text(msgspec.json.encode(envelope)[:-1] + b',"traceEvents":[')
    join.text(
        b",".join(msgspec.json.encode(event) for piece in pieces for event in metadata(piece))
    )
    for piece in pieces:
        join.piece(piece.out, piece.result.crc, piece.result.plain_bytes)
    join.text(b"]}")
    join.close()


def metadata(piece: Piece) -> Iterator[dict[str, Any]]:
    """Names and order of a rank's processes and threads.

    Ranks are ordered DP, EP, PP, TP by their ordinal, which is in the pid; within a rank its
    processes keep the order that their own trace gave them. So the indices are small and dense,
    and no axis can run over into the next.
    """
    ordered = sorted(piece.result.processes, key=_place_in_rank)
    for place, process in enumerate(ordered):
        first = process.pid // PIDS_PER_RANK * PIDS_PER_RANK
        words = [piece.rank.label, process.name, str(process.original)]
        name = " ".join(word for word in words if word) + piece.note
        yield _meta("process_name", process.pid, 0, name=name)
        if process.labels:
            yield _meta("process_labels", process.pid, 0, labels=process.labels)
        yield _meta("process_sort_index", process.pid, 0, sort_index=first + place)
    for lane in piece.result.lanes:
        yield from _lane_metadata(lane)


def _lane_metadata(lane: Lane) -> Iterator[dict[str, Any]]:
    if lane.name:
        yield _meta("thread_name", lane.pid, lane.tid, name=lane.name)
    if lane.sort_index is not None:
        yield _meta("thread_sort_index", lane.pid, lane.tid, sort_index=lane.sort_index)


def _place_in_rank(process: Process) -> tuple[int, int]:
    index = process.sort_index
    return (index if index is not None else process.pid, process.pid)


def _meta(kind: str, pid: int, tid: int, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _device_properties(pieces: list[Piece]) -> list[Any]:
    """Those of all ranks; ranks of one host describe the same devices, which are told once."""
    seen: list[Any] = []
    for piece in pieces:
        found = piece.result.envelope.get("deviceProperties", [])
        seen += [device for device in found if device not in seen]
    return seen

"""Turns raw exported segments into the files that a manifest names; a child of a capturing rank.

Path: capture.py exports JSON, writes a line -> here (``python -m engine.profiling.pack``) -> the
rank's writer thread puts the answer into the manifest.

In a process of its own, since parsing 20,000 events would hold the rank's interpreter lock while
it serves. It ends when its stdin does, so it cannot outlive the rank.
"""

from __future__ import annotations

import hashlib
import os
import sys
from math import nan
from pathlib import Path

import msgspec
from isal import isal_zlib

from engine.profiling.manifest import Anchor, Segment, Stage
from engine.profiling.reader import CHUNK_BYTES, TraceError, TraceReader, base_ns, open_trace

LEVEL = 2
GZIP = 31  # window bits for the gzip container
NICENESS = 10  # serving comes first
MARKER = "quarterdeck.clock."


class PackJob(msgspec.Struct, frozen=True, kw_only=True):
    """``raw`` becomes ``path`` and is removed. ``readings``: marker -> monotonic before, after."""

    raw: str
    path: str
    stage: Stage
    readings: dict[str, tuple[int, int]]


class PackResult(msgspec.Struct, frozen=True, kw_only=True):
    """``segment`` is None if the raw file was unusable or could not be packed."""

    segment: Segment | None
    error: str = ""


class _Marker(msgspec.Struct):
    name: str = ""
    ts: float = nan
    dur: float = nan


_DECODER = msgspec.json.Decoder(list[_Marker])


def pack(job: PackJob) -> PackResult:
    """Counts, compresses and hashes one segment; its raw file is gone afterwards."""
    raw, path = Path(job.raw), Path(job.path)
    try:
        events, anchors = _read(raw, job.readings)
        size, sha256 = _compress(raw, path)
    except (TraceError, OSError) as error:
        return PackResult(segment=None, error=f"{path.name}: {error}")
    finally:
        raw.unlink(missing_ok=True)
    segment = Segment(
        path=path.name,
        bytes=size,
        sha256=sha256,
        events=events,
        stage=job.stage,
        anchors=anchors,
    )
    return PackResult(segment=segment)


def _read(raw: Path, readings: dict[str, tuple[int, int]]) -> tuple[int, tuple[Anchor, ...]]:
    """Number of events, and the anchors whose markers are among them."""
    anchors = []
    with open_trace(raw) as stream:
        reader = TraceReader(stream, _DECODER)
        base = base_ns(reader.envelope)
        for batch in reader:
            for event in batch:
                if not event.name.startswith(MARKER) or event.name not in readings:
                    continue
                before, after = readings[event.name]
                start = base + round(event.ts * 1000.0)
                anchors.append(
                    Anchor(
                        monotonic_before_ns=before,
                        monotonic_after_ns=after,
                        trace_start_ns=start,
                        trace_end_ns=start + round(event.dur * 1000.0),
                    )
                )
    return reader.events, tuple(anchors)


def _compress(raw: Path, path: Path) -> tuple[int, str]:
    """Size and sha256 of the finished file."""
    digest, size = hashlib.sha256(), 0
    partial = path.with_name(f".{path.name}.part")
    compressor = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, GZIP)
    with raw.open("rb") as plain, partial.open("wb") as out:
        try:
            while piece := plain.read(CHUNK_BYTES):
                packed = compressor.compress(piece)
                size += out.write(packed)
                digest.update(packed)
            packed = compressor.flush()
            size += out.write(packed)
            digest.update(packed)
            out.flush()
            os.fsync(out.fileno())
            os.replace(partial, path)
        except BaseException:
            partial.unlink()
            raise
    return size, digest.hexdigest()


def main() -> int:
    """One job per line on stdin, one answer per line on stdout, in order."""
    os.nice(NICENESS)
    for line in sys.stdin.buffer:
        answer = pack(msgspec.json.decode(line, type=PackJob))
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

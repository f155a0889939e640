"""One rank's share of a merged trace: segments in, one piece of a deflate stream out.

Path: merge.py starts ``python -m engine.profiling.part`` per rank -> here -> merge.py joins.

The job comes as JSON on stdin, the piece goes to stdout, progress and the result go to stderr as
lines of JSON. The piece holds ``,event,event...`` without the metadata events: those must stand in
front of all events of all ranks, so they travel in the result. A segment is taken whole or not at
all: what a damaged one wrote is cut off again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec
from isal import isal_zlib
from msgspec import UNSET, UnsetType

from engine.profiling.events import FLOW_PHASES, Event, FlowPairs, IdSpace, LooseEvent
from engine.profiling.reader import (
    TraceError,
    TraceReader,
    UnknownFieldError,
    base_ns,
    open_trace,
)

LEVEL = 2  # of isal: 5 % smaller than level 1 at the same speed; level 3 is four times slower
RAW_DEFLATE = -15
PIDS_PER_RANK = 1000  # merged pid = ordinal of the rank * 1000 + number of the process in the rank
MAX_LANES = 20_000
WORD_TIDS = 900_000_000  # tids that were words are numbered from here; Linux tids end at 4,194,304
PROGRESS_S = 0.5

STRICT = msgspec.json.Decoder(list[Event])
LOOSE = cast("msgspec.json.Decoder[list[Event]]", msgspec.json.Decoder(list[LooseEvent]))


class PartSegment(msgspec.Struct, frozen=True, kw_only=True):
    """``shift_ns`` brings absolute trace times to the merged scale. ``sha256`` "" : not known."""

    path: str
    sha256: str
    events: int
    namespace: int
    shift_ns: int


class PartJob(msgspec.Struct, frozen=True, kw_only=True):
    """All of one rank. ``ordinal`` counts from 1 in display order, ``start_ns`` is time zero."""

    ordinal: int
    start_ns: int
    segments: list[PartSegment]


class Lane(msgspec.Struct, kw_only=True):
    """One thread (or stream) of a rank; ``name`` and ``sort_index`` as the trace gave them."""

    pid: int
    tid: int
    name: str = ""
    sort_index: int | None = None


class Process(msgspec.Struct, kw_only=True):
    """One process (or device) of a rank, numbered for the merged trace."""

    pid: int
    original: int | str
    name: str = ""
    labels: str = ""
    sort_index: int | None = None


class PartResult(msgspec.Struct, kw_only=True, tag=True):
    """What the piece on stdout holds. ``crc`` and ``plain_bytes`` are of the text inside it."""

    crc: int = 0
    plain_bytes: int = 0
    events: int = 0
    taken: list[int] = []  # indices of the job's segments
    errors: dict[int, str] = {}  # index of a segment -> why it was left out
    warnings: list[str] = []
    processes: list[Process] = []
    lanes: list[Lane] = []
    envelope: dict[str, Any] = {}  # of the first segment taken


class PartProgress(msgspec.Struct, kw_only=True, tag=True):
    events: int


class Lanes:
    """Maps a rank's own pids and tids to integers that are unique in the merged trace."""

    def __init__(self, ordinal: int) -> None:
        self._first_pid = ordinal * PIDS_PER_RANK
        self.processes: dict[int | str, Process] = {}
        self.lanes: dict[tuple[int | str, int | str], Lane] = {}
        self.places: dict[tuple[int | str, int | str], tuple[int, int]] = {}

    def place(self, pid: int | str, tid: int | str) -> tuple[int, int]:
        """Merged (pid, tid) of a lane, made up when it is new."""
        process = self._process(pid)
        if len(self.lanes) >= MAX_LANES:
            raise TraceError(f"more than {MAX_LANES} threads in one rank")
        known = isinstance(tid, int) and 0 <= tid < WORD_TIDS
        number = tid if known and isinstance(tid, int) else WORD_TIDS + len(self.lanes)
        name = "" if isinstance(tid, int) else tid
        self.lanes[pid, tid] = Lane(pid=process.pid, tid=number, name=name)
        self.places[pid, tid] = (process.pid, number)
        return process.pid, number

    def describe(self, event: Event) -> bool:
        """Notes a metadata event about a process or thread; False if it is of another kind."""
        kind = bytes(event.name).strip(b'"') if not isinstance(event.name, UnsetType) else b""
        args = {} if isinstance(event.args, UnsetType) else msgspec.json.decode(event.args)
        if kind.startswith(b"process_"):
            target: Process | Lane = self._process(event.pid)
        elif kind.startswith(b"thread_"):
            if (event.pid, event.tid) not in self.places:
                self.place(event.pid, event.tid)
            target = self.lanes[event.pid, event.tid]
        else:
            return False
        match kind.partition(b"_")[2]:
            case b"name":
                target.name = str(args.get("name", ""))
            case b"labels" if isinstance(target, Process):
                target.labels = str(args.get("labels", ""))
            case b"sort_index":
                value = args.get("sort_index")
                target.sort_index = value if isinstance(value, int) else None
            case _:
                return False
        return True

    def _process(self, pid: int | str) -> Process:
        process = self.processes.get(pid)
        if process is None:
            if len(self.processes) >= PIDS_PER_RANK:
                raise TraceError(f"more than {PIDS_PER_RANK} processes in one rank")
            number = self._first_pid + len(self.processes)
            process = self.processes[pid] = Process(pid=number, original=pid)
        return process


class Rewriter:
    """Rewrites the events of one segment for the merged trace."""

    def __init__(self, lanes: Lanes, segment: PartSegment, base_ns: int) -> None:
        self._lanes = lanes
        self._ids = IdSpace(segment.namespace)
        self._shift_ns = base_ns + segment.shift_ns
        self.flows = FlowPairs()
        self.odd_metadata: set[str] = set()

    def rewrite(self, batch: list[Event]) -> list[Event]:
        """The events to write now. Metadata goes to the lanes, half arrows wait.

        Times become exact nanoseconds: a double holds microseconds below 2**43 (101 days) to
        better than half a nanosecond, and the integer sum is rounded once, to three decimals.
        """
        kept: list[Event] = []
        try:
            self._rewrite_into(kept, batch)
        except (ValueError, OverflowError) as error:
            raise TraceError(f"an event has no time: {error}") from error
        return kept

    def _rewrite_into(self, kept: list[Event], batch: list[Event]) -> None:
        places, shift_ns = self._lanes.places, self._shift_ns
        rename, pair = self._ids.rename, self.flows.push
        for event in batch:
            if event.ph == "M":
                self._describe(event)
                continue
            place = places.get((event.pid, event.tid)) or self._lanes.place(event.pid, event.tid)
            event.pid, event.tid = place
            event.ts = (round(event.ts * 1000.0) + shift_ns) / 1000.0
            if event.id is UNSET and event.bind_id is UNSET and event.id2 is UNSET:
                kept.append(event)
                continue
            rename(event)
            if event.ph in FLOW_PHASES:
                kept += pair(event)
            else:
                kept.append(event)

    def _describe(self, event: Event) -> None:
        if not self._lanes.describe(event):
            self.odd_metadata.add(bytes(event.name).decode() if event.name is not UNSET else "")


class PartWriter:
    """Writes one rank's piece to ``out``, a seekable file."""

    def __init__(self, job: PartJob, out: BinaryIO, progress: Callable[[int], None]) -> None:
        self._job = job
        self._out = out
        self._progress = progress
        self._lanes = Lanes(job.ordinal)
        self._encoder = msgspec.json.Encoder()
        self._result = PartResult()

    def run(self) -> PartResult:
        """Writes all segments that can be taken. OSError when the output cannot be written."""
        result = self._result
        for index, segment in enumerate(self._job.segments):
            try:
                self._take(segment)
            except TraceError as error:
                result.errors[index] = str(error)
            else:
                result.taken.append(index)
        result.processes = list(self._lanes.processes.values())
        result.lanes = list(self._lanes.lanes.values())
        return result

    def _take(self, segment: PartSegment) -> None:
        """One whole segment, or TraceError and the piece as it was before."""
        result = self._result
        before = (self._out.tell(), result.crc, result.plain_bytes, result.events)
        try:
            try:
                self._copy(segment, STRICT)
            except UnknownFieldError as error:
                self._go_back(*before)
                result.warnings.append(f"{Path(segment.path).name}: {error}; dropped")
                self._copy(segment, LOOSE)
        except TraceError:
            self._go_back(*before)
            raise

    def _go_back(self, size: int, crc: int, plain_bytes: int, events: int) -> None:
        self._out.seek(size)
        self._out.truncate()
        self._result.crc, self._result.plain_bytes = crc, plain_bytes
        self._result.events = events

    def _copy(self, segment: PartSegment, decoder: msgspec.json.Decoder[list[Event]]) -> None:
        path = Path(segment.path)
        compressor = isal_zlib.compressobj(LEVEL, isal_zlib.DEFLATED, RAW_DEFLATE)
        with open_trace(path, segment.sha256) as stream:
            reader = TraceReader(stream, decoder)
            rewriter = Rewriter(self._lanes, segment, base_ns(reader.envelope))
            for batch in reader:
                self._emit(compressor, rewriter.rewrite(batch))
        self._out.write(compressor.flush(isal_zlib.Z_FULL_FLUSH))
        if segment.events not in (-1, reader.events):
            raise TraceError(f"it has {reader.events} events, the manifest says {segment.events}")
        self._note(path.name, rewriter)
        self._result.envelope = self._result.envelope or reader.envelope

    def _emit(self, compressor: isal_zlib.Compress, events: list[Event]) -> None:
        if not events:
            return
        text = bytearray(self._encoder.encode(events))
        text[0:1] = b","  # the list's brackets go; every event stands behind something
        del text[-1:]
        result = self._result
        result.crc = isal_zlib.crc32(text, result.crc)
        result.plain_bytes += len(text)
        result.events += len(events)
        self._out.write(compressor.compress(text))
        self._progress(result.events)

    def _note(self, name: str, rewriter: Rewriter) -> None:
        notes = [f"metadata {kind} dropped" for kind in sorted(rewriter.odd_metadata)]
        if rewriter.flows.unpaired:
            notes.append(f"{rewriter.flows.unpaired} flow events without their other end dropped")
        if not rewriter.flows.checked:
            notes.append("too many flows to check their pairs")
        self._result.warnings += [f"{name}: {note}" for note in notes]


def main() -> int:
    """Job on stdin, piece on stdout, JSON lines on stderr; 1 if the piece cannot be written."""
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=PartJob)
    said = 0.0

    def progress(events: int) -> None:
        nonlocal said
        if time.monotonic() - said > PROGRESS_S:
            said = time.monotonic()
            _say(PartProgress(events=events))

    try:
        result = PartWriter(job, sys.stdout.buffer, progress).run()
        sys.stdout.buffer.flush()
    except OSError as error:
        print(f"cannot write the merged trace: {error}", file=sys.stderr)
        return 1
    _say(result)
    return 0


def _say(message: msgspec.Struct) -> None:
    sys.stderr.write(msgspec.json.encode(message).decode() + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())

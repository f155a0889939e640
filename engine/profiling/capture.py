"""Records the steps of one rank with torch's profiler, in segments, and always ends.

Path: step plan's command -> ``Capture.arm`` -> ``with capture.step(...)`` around each forward ->
pack.py -> manifest -> merge.py.

Stopping a profiler and exporting its events hold the interpreter lock (measured on torch 2.13, one
core, 19,487 events: stop 37 ms, export 25 ms, freeing 9 ms; with record_shapes 130, 43 and 55). So
a segment ends before 20,000 events, and before a part of its end would hold the next token up for
more than two steps. The three parts are spread over the steps that follow: at most one of them
between two steps. Counting, compressing and hashing happen in a child.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.autograd.profiler import profile, record_function

from engine.artifacts import Rank
from engine.errors import BadRequest, Conflict
from engine.profiling.manifest import RankManifest, Stage, StepMark
from engine.profiling.pack import MARKER, PackJob
from engine.profiling.spec import CaptureSpec
from engine.profiling.writer import Writer

SEGMENT_BYTES = 4_500_000  # of exported JSON: 18,000 of torch's smallest events (250 bytes)
PART_STEPS = 2  # of the shortest seen: so long may a part of a segment's end take, or
PART_NS = 5_000_000  # if that is longer: below it the fixed costs of more segments would prevail
ANCHOR_TRIES = 3  # the tightest counts; the first one pays for cold caches
MAX_MARKS = 20_000  # steps described in a manifest
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(kw_only=True)
class Recording:
    """A segment whose profiler runs. ``steps`` were recorded so far; the longest part of its end
    took ``part_ns``."""

    profiler: profile
    stage: Stage
    readings: dict[str, tuple[int, int]]
    steps: int = 0
    part_ns: int = 0


class Capture:
    """What a rank's runner holds for its whole life; used from its step thread alone.

    The runner asks ``armed`` before each step. While it is true each forward runs inside
    ``step(...)``, and ``tick()`` is called at least once a second when there is no step to run: it
    ends a capture whose time is over. Unarmed there is no profiler and no cost but that question.
    """

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._session: Session | None = None

    @property
    def armed(self) -> bool:
        """Whether steps must run inside ``step`` (records, or still has something to write)."""
        return self._session is not None and not self._session.drained

    def arm(self, spec: CaptureSpec) -> None:
        """Starts a capture before the next step.

        Conflict while another one runs or its manifest was not taken; BadRequest if the directory
        cannot be written.
        """
        began = time.monotonic_ns()
        if self._session is not None:
            raise Conflict(f"profile {self._session.spec.profile_id} is still running")
        if not os.access(spec.directory, os.W_OK | os.X_OK):
            raise BadRequest(f"cannot write into {spec.directory}")
        self._session = Session(self._rank, spec)
        self._session.pause_ns = time.monotonic_ns() - began

    @contextmanager
    def step(self, number: int, stage: Stage, *, rows: int, tokens: int) -> Iterator[None]:
        """Around one forward: ``rows`` requests, ``tokens`` positions computed."""
        session = self._session
        if session is None:
            yield
            return
        with session.own_time():
            session.before(number, stage)
        pause_ns, session.pause_ns = session.pause_ns, 0
        start_ns = time.monotonic_ns()
        try:
            with record_function(f"{stage}[step={number} bs={rows} toks={tokens}]"):
                yield
        finally:
            mark = StepMark(
                step=number,
                stage=stage,
                rows=rows,
                tokens=tokens,
                start_ns=start_ns,
                end_ns=time.monotonic_ns(),
                pause_ns=pause_ns,
                recorded=session.recording is not None,
            )
            with session.own_time():
                session.after(mark)

    def tick(self) -> None:
        """Between steps of an idle engine: ends what is over time, writes what waits."""
        if self._session is not None:
            self._session.tick()

    def stop(self, reason: str) -> None:
        """Ends the recording now; the manifest follows when the files are written."""
        if self._session is None:
            raise Conflict("no profile is running")
        with self._session.own_time():
            self._session.finish(reason)

    def take_manifest(self) -> RankManifest | None:
        """The manifest, once, as soon as all files it names are written; frees the capture."""
        session = self._session
        if session is None or not session.written:
            return None
        self._session = None
        return session.manifest

    def close(self) -> None:
        """Ends at once, with the rank; segments that were stopped are still written."""
        if self._session is not None:
            self._session.finish("the rank ended")
            self._session.drain()
            self._session.writer.close()
            self._session = None


class Session:
    """One armed capture. Owns the running profiler and the work that its end still needs."""

    def __init__(self, rank: Rank, spec: CaptureSpec) -> None:
        self.spec = spec
        self.manifest = RankManifest(
            profile_id=spec.profile_id,
            rank=rank,
            activities=effective_activities(spec),
            host=platform.node(),
            boot_id=BOOT_ID.read_text().strip() if BOOT_ID.exists() else platform.node(),
            pid=os.getpid(),
            wall_minus_monotonic_ns=time.time_ns() - time.monotonic_ns(),
            armed_ns=time.monotonic_ns(),
        )
        self.writer = Writer(Path(spec.directory), self.manifest)
        self.recording: Recording | None = None
        self.ended = False
        self.pause_ns = 0  # time spent here on the step thread since the last step
        self._deadline_ns = self.manifest.armed_ns + int(spec.max_seconds * 1e9)
        self._counts: dict[Stage, int] = {}
        self._chores: deque[Callable[[], None]] = deque()
        self._segments = 0
        self._bytes = 0
        self._step_bytes = 0.0  # JSON bytes of one step, the most seen
        self._step_ns = 0  # the shortest recorded step
        self._measured: Recording | None = None  # the last one of whose end something is known

    @property
    def drained(self) -> bool:
        """Nothing is left to do on the step thread."""
        return self.ended and not self._chores

    @property
    def written(self) -> bool:
        """All files are in place, the manifest too."""
        return self.drained and self.writer.done

    @contextmanager
    def own_time(self) -> Iterator[None]:
        """Counts what happens inside as time that steps had to wait for the capture."""
        began = time.monotonic_ns()
        yield
        self.pause_ns += time.monotonic_ns() - began

    def before(self, number: int, stage: Stage) -> None:
        """Decides whether this step is recorded, and in which segment."""
        self._check_bounds()
        if self.ended or number < (self.spec.start_step or 0):
            return
        segment_stage: Stage = stage if self.spec.profile_by_stage else ""
        if self.recording and self.recording.stage != segment_stage:
            self._stop_recording()
        if not self.recording and self._left(segment_stage):
            self._start_recording(segment_stage)

    def after(self, mark: StepMark) -> None:
        """Counts the step, ends the segment if it is full, else does one waiting chore."""
        if len(self.manifest.steps) < MAX_MARKS:
            self.manifest.steps.append(mark)
        if (recording := self.recording) is None:
            self._do_chore()
            return
        recording.steps += 1
        took_ns = mark.end_ns - mark.start_ns
        self._step_ns = min(self._step_ns or took_ns, took_ns)
        self._counts[recording.stage] = self._counts.get(recording.stage, 0) + 1
        if not self._left(recording.stage) or self._full(recording):
            self._stop_recording()
            if len(self._chores) > 2:  # those of the segment before: they must not pile up
                self._do_chore()
        else:
            self._do_chore()
        self._check_bounds()

    def tick(self) -> None:
        self._check_bounds()
        self.drain()

    def drain(self) -> None:
        while self._chores:
            self._do_chore()

    def finish(self, reason: str) -> None:
        """No further step is recorded. Ends the writer once the last segment was exported."""
        if self.ended:
            return
        if self.recording:
            self._stop_recording()
        self.ended = True
        self.manifest.reason = reason
        self._chores.append(self._end)

    def _end(self) -> None:
        self.manifest.final_pause_ns = self.pause_ns
        self.writer.finish()

    def _check_bounds(self) -> None:
        if time.monotonic_ns() >= self._deadline_ns:
            self.finish(f"reached {self.spec.max_seconds:g} seconds")
        elif self._bytes >= self.spec.max_bytes:
            self.finish(f"reached {self.spec.max_bytes} bytes")
        elif self.writer.error:
            self.finish(self.writer.error)
        elif self._all_counted():
            self.finish(f"recorded {sum(self._counts.values())} steps")

    def _all_counted(self) -> bool:
        stages: tuple[Stage, ...] = ("prefill", "decode") if self.spec.profile_by_stage else ("",)
        return not any(self._left(stage) for stage in stages)

    def _left(self, stage: Stage) -> int:
        return self.spec.step_limit - self._counts.get(stage, 0)

    def _full(self, recording: Recording) -> bool:
        """Whether one more step could make the segment, or a part of its end, too large; the first
        has one step."""
        steps = recording.steps + 1
        if steps * (self._step_bytes or SEGMENT_BYTES) > SEGMENT_BYTES:
            return True
        before = self._measured
        allowed_ns = max(PART_NS, PART_STEPS * self._step_ns)
        return before is not None and steps > math.ceil(
            before.steps * allowed_ns / max(1, before.part_ns)
        )

    def _start_recording(self, stage: Stage) -> None:
        profiler = make_profiler(self.spec, self.manifest.activities)
        profiler.__enter__()  # type: ignore[no-untyped-call]
        readings = read_anchors("start", self._segments)
        self.recording = Recording(profiler=profiler, stage=stage, readings=readings)

    def _stop_recording(self) -> None:
        recording, self.recording = self.recording, None
        assert recording
        recording.readings |= read_anchors("stop", self._segments)
        with self._part(recording):
            recording.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        name = f"{self.spec.profile_id}-{self.manifest.rank.name}-s{self._segments:03d}"
        self._segments += 1
        held = [recording.profiler]  # the last reference: clearing it frees the events
        for chore in (lambda: self._export(recording, name), held.clear):
            self._chores.append(partial(self._do_part, chore, recording))

    @contextmanager
    def _part(self, recording: Recording) -> Iterator[None]:
        """Notes how long a part of the end of a segment takes."""
        began = time.monotonic_ns()
        yield
        recording.part_ns = max(recording.part_ns, time.monotonic_ns() - began)
        self._measured = recording

    def _do_part(self, chore: Callable[[], None], recording: Recording) -> None:
        with self._part(recording):
            chore()

    def _export(self, recording: Recording, name: str) -> None:
        directory = Path(self.spec.directory)
        raw = directory / f".{name}.json"
        recording.profiler.export_chrome_trace(str(raw))  # type: ignore[no-untyped-call]
        size = raw.stat().st_size if raw.exists() else 0  # kineto only logs a failed write
        self._bytes += size
        self._step_bytes = max(self._step_bytes, size / recording.steps)
        self.writer.send(
            PackJob(
                raw=str(raw),
                path=str(directory / f"{name}.trace.json.gz"),
                stage=recording.stage,
                readings=recording.readings,
            )
        )
        del recording.profiler

    def _do_chore(self) -> None:
        if self._chores:
            self._chores.popleft()()


def effective_activities(spec: CaptureSpec) -> tuple[str, ...]:
    """What can be recorded here: GPU is left out where there is none, and CPU is the least."""
    usable = [kind for kind in spec.activities if kind != "GPU" or torch.cuda.is_available()]
    return tuple(usable) or ("CPU",)


def make_profiler(spec: CaptureSpec, activities: tuple[str, ...]) -> profile:
    """torch's profiler without ``torch.profiler.profile``, which imports the compiler (1.1 s)."""
    return profile(
        use_kineto=True,
        use_cpu="CPU" in activities or "MEM" in activities,
        use_device="cuda" if "GPU" in activities else None,
        record_shapes=spec.record_shapes,
        profile_memory="MEM" in activities,
        with_stack=spec.with_stack,
    )


def read_anchors(kind: str, segment: int) -> dict[str, tuple[int, int]]:
    """Marker names and the monotonic nanoseconds before and after each marker was recorded."""
    readings: dict[str, tuple[int, int]] = {}
    for attempt in range(ANCHOR_TRIES):
        name = f"{MARKER}{kind}.{segment}.{attempt}"
        before = time.monotonic_ns()
        with record_function(name):
            pass
        readings[name] = (before, time.monotonic_ns())
    return readings

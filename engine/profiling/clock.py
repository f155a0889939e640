"""Puts the segments of all ranks on one time scale, and says how well.

Path: manifest.py -> here -> merge.py, summary.py.

Each segment of our own captures has anchors (``manifest.Anchor``): a marker event of the trace
that lies between two readings of the monotonic clock. So the offset monotonic - trace lies in

    [before - marker start, after - marker end]

and several anchors cut that interval down. Ranks of one boot of one host share the monotonic clock,
so their offsets compare. Hosts are joined by their wall clocks, whose error nobody measured: the
uncertainty is then unknown, never a guess. The scale is the wall clock in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.artifacts import confined
from engine.errors import BadRequest
from engine.profiling.manifest import (
    Anchor,
    Found,
    Problem,
    RankManifest,
    Segment,
    Source,
)
from engine.profiling.reader import TraceError, first_time_ns

SECOND_NS = 1_000_000_000


class ClockReport(msgspec.Struct, frozen=True, kw_only=True):
    """``uncertainty_ns``: two events of different ranks are at most this much further apart or
    closer than shown; None if that is not known for some pair of ranks."""

    method: str
    uncertainty_ns: int | None
    uncalibrated: list[str]
    hosts: int


@dataclass(frozen=True, kw_only=True)
class Offset:
    """Add ``ns`` to a trace time to get a monotonic time, right to ``uncertainty_ns``."""

    ns: int
    uncertainty_ns: int


@dataclass(frozen=True, kw_only=True)
class TimedSegment:
    """A segment whose file exists. Add ``shift_ns`` to its trace times for the common scale."""

    segment: Segment
    path: Path
    shift_ns: int
    uncertainty_ns: int | None


@dataclass(kw_only=True)
class Aligned:
    """All usable segments, by rank in display order; ``start_ns`` is zero of the common scale."""

    start_ns: int
    ranks: list[tuple[Source, list[TimedSegment]]]
    clock: ClockReport
    problems: list[Problem]


def offset_of(anchors: Sequence[Anchor]) -> Offset:
    """Offset monotonic - trace that suits all anchors best; drift widens the uncertainty."""
    lows = [anchor.monotonic_before_ns - anchor.trace_start_ns for anchor in anchors]
    highs = [anchor.monotonic_after_ns - anchor.trace_end_ns for anchor in anchors]
    low, high = max(lows), min(highs)
    if low > high:  # the clocks drifted between the anchors: no one offset suits all of them
        low, high = min(lows), max(highs)
    return Offset(ns=(low + high) // 2, uncertainty_ns=(high - low + 1) // 2)


def align(found: Found) -> Aligned:
    """Places every segment; unusable ones (no file, a path that leads elsewhere) are problems."""
    walls = host_walls(found.sources)
    problems = list(found.problems)
    placed = [(source, _place(found, source, walls, problems)) for source in found.sources]
    start_ns = _start_ns([segment for _, segments in placed for segment in segments])
    ranks = [
        (source, [_from(start_ns, segment) for segment in segments]) for source, segments in placed
    ]
    return Aligned(
        start_ns=start_ns, ranks=ranks, clock=_report(ranks, hosts=len(walls)), problems=problems
    )


def host_walls(sources: Sequence[Source]) -> dict[str, int]:
    """Wall clock - monotonic clock of each boot, one reading for all ranks of it."""
    walls: dict[str, int] = {}
    for source in sources:
        if source.manifest:
            walls.setdefault(source.manifest.boot_id, source.manifest.wall_minus_monotonic_ns)
    return walls


def _place(
    found: Found, source: Source, walls: dict[str, int], problems: list[Problem]
) -> list[TimedSegment]:
    """Segments of one rank with shifts to the wall clock."""
    placed = []
    for segment in source.segments:
        try:
            path = confined(found.directory, segment.path)
            if not path.is_file():
                raise BadRequest("there is no such file")
        except BadRequest as error:
            problems.append(Problem(rank=source.rank.name, file=segment.path, error=error.message))
            continue
        placed.append(_timed(source.manifest, segment, path, walls))
    return placed


def _timed(
    manifest: RankManifest | None, segment: Segment, path: Path, walls: dict[str, int]
) -> TimedSegment:
    if manifest is None or not segment.anchors:
        return TimedSegment(segment=segment, path=path, shift_ns=0, uncertainty_ns=None)
    offset = offset_of(segment.anchors)
    return TimedSegment(
        segment=segment,
        path=path,
        shift_ns=offset.ns + walls[manifest.boot_id],
        uncertainty_ns=offset.uncertainty_ns,
    )


def _start_ns(segments: Sequence[TimedSegment]) -> int:
    """The whole second before the earliest event, so that no time is negative."""
    first = min((time for timed in segments if (time := _first_ns(timed)) is not None), default=0)
    return max(0, (first - 1) // SECOND_NS * SECOND_NS)


def _first_ns(timed: TimedSegment) -> int | None:
    if timed.segment.anchors:
        return min(anchor.trace_start_ns for anchor in timed.segment.anchors) + timed.shift_ns
    try:
        return first_time_ns(timed.path) + timed.shift_ns
    except TraceError:
        return None  # whoever reads the whole file will say why


def _from(start_ns: int, timed: TimedSegment) -> TimedSegment:
    return TimedSegment(
        segment=timed.segment,
        path=timed.path,
        shift_ns=timed.shift_ns - start_ns,
        uncertainty_ns=timed.uncertainty_ns,
    )


def _report(ranks: Sequence[tuple[Source, list[TimedSegment]]], hosts: int) -> ClockReport:
    uncalibrated = [
        source.rank.name
        for source, segments in ranks
        if any(timed.uncertainty_ns is None for timed in segments)
    ]
    worst = max(
        (timed.uncertainty_ns or 0 for _, segments in ranks for timed in segments), default=0
    )
    if hosts == 0:
        method = "none: the traces have no clock anchors and keep their own clocks"
    elif hosts == 1:
        method = "anchors on the host's monotonic clock"
    else:
        method = f"anchors, then the wall clocks of {hosts} hosts, which were not compared"
    return ClockReport(
        method=method,
        uncertainty_ns=None if uncalibrated or hosts != 1 else 2 * worst,
        uncalibrated=uncalibrated,
        hosts=hosts,
    )

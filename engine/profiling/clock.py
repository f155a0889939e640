"""Puts the clocks of all ranks on one scale, and says how well.

Path: manifest.py -> here -> merge.py, summary.py.

Each segment of our own captures has anchors (``manifest.Anchor``): a marker event of the trace
that lies between two readings of the monotonic clock. So the offset monotonic - trace lies in

    [before - marker start, after - marker end]

and several anchors cut that interval down. Ranks of one boot of one host share the monotonic clock,
so their offsets compare. Hosts are joined by their wall clocks, whose error nobody measured: the
uncertainty is then unknown, never a guess. The scale is the wall clock in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.profiling.manifest import Anchor, Found, RankManifest, Segment


@dataclass(frozen=True, kw_only=True)
class SegmentClock:
    """Add ``offset_ns`` to a trace time. ``uncertainty_ns`` is None if it was never measured."""

    offset_ns: int
    uncertainty_ns: int | None


UNCALIBRATED = SegmentClock(offset_ns=0, uncertainty_ns=None)


@dataclass(frozen=True, kw_only=True)
class ClockReport:
    """``uncertainty_ns``: two events of different ranks are at most this much further apart or
    closer than shown; None if that is not known for some pair of ranks."""

    method: str
    uncertainty_ns: int | None
    uncalibrated: list[str]
    hosts: int


def offset_of(anchors: Sequence[Anchor]) -> SegmentClock:
    """Offset monotonic - trace that suits all anchors best; drift widens the uncertainty."""
    lows = [anchor.monotonic_before_ns - anchor.trace_start_ns for anchor in anchors]
    highs = [anchor.monotonic_after_ns - anchor.trace_end_ns for anchor in anchors]
    low, high = max(lows), min(highs)
    if low > high:  # the clocks drifted between the anchors: no one offset suits all of them
        low, high = min(lows), max(highs)
    return SegmentClock(offset_ns=(low + high) // 2, uncertainty_ns=(high - low + 1) // 2)


class Clocks:
    """Clocks of one profile: every segment's way to the common scale."""

    def __init__(self, found: Found) -> None:
        self._wall: dict[str, int] = {}
        self._worst = 0
        self._uncalibrated: list[str] = []
        for source in found.sources:
            if source.manifest:
                manifest = source.manifest
                self._wall.setdefault(manifest.boot_id, manifest.wall_minus_monotonic_ns)
            if not source.manifest or not all(part.anchors for part in source.segments):
                self._uncalibrated.append(source.rank.name)

    def segment(self, manifest: RankManifest | None, segment: Segment) -> SegmentClock:
        """From this segment's trace clock to the common wall clock."""
        if manifest is None or not segment.anchors:
            return UNCALIBRATED
        found = offset_of(segment.anchors)
        self._worst = max(self._worst, found.uncertainty_ns or 0)
        return SegmentClock(
            offset_ns=found.offset_ns + self._wall[manifest.boot_id],
            uncertainty_ns=found.uncertainty_ns,
        )

    def monotonic(self, manifest: RankManifest, at_ns: int) -> int:
        """A monotonic reading of a rank on the common scale."""
        return at_ns + self._wall[manifest.boot_id]

    def report(self) -> ClockReport:
        """What was done; valid once every segment was asked for."""
        hosts = len(self._wall)
        if hosts == 0:
            method = "none: the traces have no clock anchors and keep their own clocks"
        elif hosts == 1:
            method = "anchors on the host's monotonic clock"
        else:
            method = f"anchors, then the wall clocks of {hosts} hosts, which were not compared"
        known = hosts == 1 and not self._uncalibrated
        return ClockReport(
            method=method,
            uncertainty_ns=2 * self._worst if known else None,
            uncalibrated=list(self._uncalibrated),
            hosts=hosts,
        )


def earliest_ns(times: Iterable[int]) -> int:
    """Start of the merged scale: the whole second before the first time."""
    first = min(times, default=1_000_000_000)
    return (first - 1) // 1_000_000_000 * 1_000_000_000

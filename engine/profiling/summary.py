"""What a profile says, computed once: top operations, busy and idle ranks, stragglers, gaps.

Path: the ranks' segments -> here (a job of its own) -> ``summary-<id>.json`` -> the Profiles page.

    python -m engine.profiling.summary DIR PROFILE_ID

reads every segment once, one at a time. Times are microseconds on the profile's scale, whose zero
is ``start_ns``, the zero of the merged trace too.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from engine.artifacts import write_atomically
from engine.errors import NotFound, QuarterdeckError
from engine.profiling.clock import Aligned, ClockReport, TimedSegment, align
from engine.profiling.lanes import Names, OpTotals, RankTotals, Step, read_spans
from engine.profiling.manifest import (
    Found,
    Problem,
    RankManifest,
    Source,
    find,
    summary_path,
)
from engine.profiling.reader import TraceError

TOP_OPS = 200
MAX_STEP_ROWS = 2_000  # of one rank
NAME_CHARACTERS = 200
STRAGGLER_SHARE = 0.10  # slower than its group by this part of a step


class OpRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation over all ranks. ``share`` is of the self time of all operations."""

    name: str
    cat: str
    count: int
    self_us: float
    total_us: float
    max_us: float
    share: float
    communication: bool


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """One recorded step of one rank."""

    rank: str
    step: int
    stage: str
    rows: int
    tokens: int
    start_us: float
    dur_us: float
    busy_us: float
    communication_us: float


class RankRow(msgspec.Struct, frozen=True, kw_only=True):
    """One rank over its recorded windows (its steps; without step names its whole segments).

    ``busy``: an operation ran (on the device, if the trace has device events); ``idle``: none did.
    ``outside_ops_us``: time of the steps in which none ran: Python, launches, waiting.
    ``largest_gap_us``: the longest a running request waited for a token because of the capture and
    the step itself; None for traces without a manifest.
    """

    rank: str
    label: str
    complete: bool
    segments: int
    events: int
    steps: int
    window_us: float
    busy_us: float
    idle_us: float
    communication_us: float
    outside_ops_us: float
    median_step_us: dict[str, float]  # by stage
    pause_us: float | None
    largest_gap_us: float | None


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank whose own time (step without communication) exceeds its group's median."""

    rank: str
    group: str
    steps: int
    slowest_in: int
    mean_excess_us: float
    mean_excess_share: float


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Longest spans of each rank, for lanes: (start_us, dur_us, lane, depth, index of the name)."""

    names: list[str]
    blocks: dict[str, list[tuple[float, float, int, int, int]]]


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """``median_step_us`` is of steps that were not recorded where there are some, else of all."""

    profile_id: str
    start_ns: int
    partial: bool
    missing: list[str]
    problems: list[Problem]
    clock: ClockReport
    ranks: list[RankRow]
    top_ops: list[OpRow]
    steps: list[StepRow]
    stragglers: list[Straggler]
    busy_share: float
    communication_share: float
    median_step_us: float | None
    largest_gap_us: float | None
    timeline: Timeline


def summarize(directory: Path, profile_id: str) -> Summary:
    """Reads the profile and writes its summary beside it.

    NotFound if there is nothing of it, BadRequest for an impossible id, OSError if the directory
    cannot be read or written. A segment that cannot be read is a problem of the summary.
    """
    found = find(directory, profile_id)
    aligned = align(found)
    if not aligned.ranks:
        raise NotFound(f"there is no trace of profile {profile_id}")
    summary = _summarize(found, aligned)
    text = msgspec.json.encode(summary)
    write_atomically(summary_path(directory, profile_id), text)
    return summary


def read_summary(path: Path) -> Summary:
    """A written summary. OSError, or msgspec.DecodeError for another kind of file."""
    return msgspec.json.decode(path.read_bytes(), type=Summary)


def _summarize(found: Found, aligned: Aligned) -> Summary:
    names, ops = Names(), OpTotals()
    ranks, steps, blocks = [], [], {}
    for source, segments in aligned.ranks:
        totals = RankTotals(names, ops)
        for timed in segments:
            _read(source, timed, totals, aligned)
        rows = step_rows(source.rank.name, totals)
        ranks.append(rank_row(source, len(segments), totals))
        steps += rows
        blocks[source.rank.name] = totals.blocks()
    window = sum(rank.window_us for rank in ranks) or 1.0
    manifests = [source.manifest for source, _ in aligned.ranks if source.manifest]
    return Summary(
        profile_id=found.profile_id,
        start_ns=aligned.start_ns,
        partial=bool(found.waiting_for or aligned.problems),
        missing=found.missing,
        problems=aligned.problems,
        clock=aligned.clock,
        ranks=ranks,
        top_ops=op_rows(names, ops),
        steps=steps,
        stragglers=find_stragglers(steps),
        busy_share=sum(rank.busy_us for rank in ranks) / window,
        communication_share=sum(rank.communication_us for rank in ranks) / window,
        median_step_us=median_step_us(manifests),
        largest_gap_us=max((r.largest_gap_us for r in ranks if r.largest_gap_us), default=None),
        timeline=Timeline(names=names.short(NAME_CHARACTERS), blocks=blocks),
    )


def _read(source: Source, timed: TimedSegment, totals: RankTotals, aligned: Aligned) -> None:
    try:
        path, sha256 = timed.path, timed.segment.sha256
        totals.add(read_spans(path, sha256, timed.shift_ns, totals.names, totals.lanes))
    except TraceError as error:
        aligned.problems.append(
            Problem(rank=source.rank.name, file=timed.segment.path, error=str(error))
        )


def op_rows(names: Names, ops: OpTotals) -> list[OpRow]:
    """Operations with the most self time; annotations and markers are none."""
    everything = sum(ops.own[number] for number in names.work_numbers()) or 1.0
    top = sorted(names.work_numbers(), key=lambda number: -ops.own[number])[:TOP_OPS]
    return [
        OpRow(
            name=names.pairs[number][1][:NAME_CHARACTERS],
            cat=names.pairs[number][0],
            count=ops.count[number],
            self_us=ops.own[number],
            total_us=ops.total[number],
            max_us=ops.longest[number],
            share=ops.own[number] / everything,
            communication=names.is_communication(number),
        )
        for number in top
        if ops.count[number]
    ]


def step_rows(rank: str, totals: RankTotals) -> list[StepRow]:
    rows = [
        StepRow(
            rank=rank,
            step=step.step,
            stage=step.stage,
            rows=step.rows,
            tokens=step.tokens,
            start_us=step.start_us,
            dur_us=step.dur_us,
            busy_us=busy_us,
            communication_us=communication_us,
        )
        for step, busy_us, communication_us in totals.steps
    ]
    return sorted(rows, key=lambda row: row.start_us)[:MAX_STEP_ROWS]


def rank_row(source: Source, segments: int, totals: RankTotals) -> RankRow:
    manifest = source.manifest
    return RankRow(
        rank=source.rank.name,
        label=source.rank.label,
        complete=manifest is None or manifest.complete,
        segments=segments,
        events=totals.events,
        steps=len(totals.steps),
        window_us=totals.window_us,
        busy_us=totals.busy_us,
        idle_us=max(0.0, totals.window_us - totals.busy_us),
        communication_us=totals.communication_us,
        outside_ops_us=totals.outside_ops_us,
        median_step_us=_median_by_stage([step for step, _, _ in totals.steps]),
        pause_us=sum(mark.pause_ns for mark in manifest.steps) / 1000.0 if manifest else None,
        largest_gap_us=largest_gap_us(manifest) if manifest else None,
    )


def _median_by_stage(steps: list[Step]) -> dict[str, float]:
    durations = defaultdict(list)
    for step in steps:
        durations[step.stage].append(step.dur_us)
    return {stage: statistics.median(found) for stage, found in durations.items()}


def median_step_us(manifests: list[RankManifest]) -> float | None:
    """Median decode step, of unrecorded steps if the manifests describe any."""
    marks = [m for manifest in manifests for m in manifest.steps if m.stage == "decode"]
    plain = [mark for mark in marks if not mark.recorded] or marks
    if not plain:
        return None
    return statistics.median(mark.end_ns - mark.start_ns for mark in plain) / 1000.0


def largest_gap_us(manifest: RankManifest) -> float | None:
    """Longest wait for a token: what the capture did before a step, and the step."""
    gaps = [mark.pause_ns + mark.end_ns - mark.start_ns for mark in manifest.steps]
    if not gaps:
        return None
    after_last = manifest.final_pause_ns + 1000.0 * (median_step_us([manifest]) or 0.0)
    return max(*gaps, after_last) / 1000.0


def find_stragglers(steps: list[StepRow]) -> list[Straggler]:
    """Ranks that are slower than the others of their dp group in the steps they share.

    Ranks of one group wait for each other in their collectives, so only the time outside of those
    tells who was late.
    """
    shared: dict[tuple[str, int], list[StepRow]] = defaultdict(list)
    for row in steps:
        shared[row.rank.partition("-")[0], row.step].append(row)
    excess: dict[tuple[str, str], list[tuple[float, float, bool]]] = defaultdict(list)
    for (group, _), rows in shared.items():
        if len(rows) < 2:
            continue
        own = {row.rank: row.dur_us - row.communication_us for row in rows}
        middle = statistics.median_low(own.values())
        for rank, time_us in own.items():
            late = (time_us - middle, middle, time_us == max(own.values()))
            excess[group, rank].append(late)
    found = [_straggler(group, rank, late) for (group, rank), late in excess.items()]
    slow = [one for one in found if one.mean_excess_share > STRAGGLER_SHARE]
    return sorted(slow, key=lambda one: -one.mean_excess_share)


def _straggler(group: str, rank: str, late: list[tuple[float, float, bool]]) -> Straggler:
    mean_us = statistics.fmean(excess for excess, _, _ in late)
    middle_us = statistics.fmean(middle for _, middle, _ in late)
    return Straggler(
        rank=rank,
        group=group,
        steps=len(late),
        slowest_in=sum(slowest for _, _, slowest in late),
        mean_excess_us=mean_us,
        mean_excess_share=mean_us / middle_us if middle_us else 0.0,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.summary")
    parser.add_argument("directory", type=Path)
    parser.add_argument("profile_id")
    options = parser.parse_args()
    try:
        summary = summarize(options.directory, options.profile_id)
    except (QuarterdeckError, OSError) as error:
        print(f"no summary: {error}", file=sys.stderr)
        return 1
    brief = msgspec.to_builtins(summary) | {"timeline": None, "steps": len(summary.steps)}
    print(msgspec.json.format(msgspec.json.encode(brief)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

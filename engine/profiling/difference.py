"""Two profiles side by side: what got slower, what is new, what is gone.

Path: two ``summary-<id>.json`` -> here -> the Profiles page, or by hand:

    python -m engine.profiling.difference BEFORE AFTER

each a summary's file or ``DIR/ID``, the id of a summarized profile in a directory. Profiles differ
in length, so operations are compared per recorded step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from engine.profiling.manifest import summary_path
from engine.profiling.summary import Summary, read_summary

Op = tuple[str, str, bool]  # category, name, whether it communicates


class OpChange(msgspec.Struct, frozen=True, kw_only=True):
    """Self time and calls per recorded step; 0 where the operation did not occur."""

    name: str
    cat: str
    communication: bool
    before_us: float
    after_us: float
    change_us: float
    before_calls: float
    after_calls: float


class StageChange(msgspec.Struct, frozen=True, kw_only=True):
    """Median step of a stage over all ranks; ``ratio`` below 1 is faster."""

    stage: str
    before_us: float
    after_us: float
    ratio: float


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """``ops``: largest change first. Shares are of the recorded time of all ranks; times are None
    where a profile does not tell them. ``problems``: why the two may not be alike."""

    before: str
    after: str
    problems: list[str]
    stages: list[StageChange]
    ops: list[OpChange]
    busy_share: tuple[float, float]
    communication_share: tuple[float, float]
    median_step_us: tuple[float | None, float | None]
    largest_gap_us: tuple[float | None, float | None]


def compare(before: Summary, after: Summary) -> Difference:
    """What changed from ``before`` to ``after``."""
    then, now = _per_step(before), _per_step(after)
    changes = [_change(key, then.get(key), now.get(key)) for key in then.keys() | now.keys()]
    return Difference(
        before=before.profile_id,
        after=after.profile_id,
        problems=_problems(before, after),
        stages=_stages(before, after),
        ops=sorted(changes, key=lambda change: (-abs(change.change_us), change.name)),
        busy_share=(before.busy_share, after.busy_share),
        communication_share=(before.communication_share, after.communication_share),
        median_step_us=(before.median_step_us, after.median_step_us),
        largest_gap_us=(before.largest_gap_us, after.largest_gap_us),
    )


def _problems(*sides: Summary) -> list[str]:
    found = []
    for side in sides:
        if side.partial:
            lacks = f", missing {' '.join(side.missing)}" if side.missing else ""
            found.append(f"{side.profile_id} is partial{lacks}")
        if not any(rank.steps for rank in side.ranks):
            found.append(f"{side.profile_id} names no steps: its times are of the whole trace")
    before, after = (sorted(rank.rank for rank in side.ranks) for side in sides)
    if before != after:
        found.append(f"they hold other ranks: {' '.join(before)} and {' '.join(after)}")
    return found


def _per_step(summary: Summary) -> dict[Op, tuple[float, float]]:
    """Self time and calls of each operation per recorded step, or in all if no step has a name."""
    steps = sum(rank.steps for rank in summary.ranks) or 1
    return {
        (op.cat, op.name, op.communication): (op.self_us / steps, op.count / steps)
        for op in summary.top_ops
    }


def _change(key: Op, then: tuple[float, float] | None, now: tuple[float, float] | None) -> OpChange:
    (before_us, before_calls), (after_us, after_calls) = then or (0.0, 0.0), now or (0.0, 0.0)
    return OpChange(
        cat=key[0],
        name=key[1],
        communication=key[2],
        before_us=before_us,
        after_us=after_us,
        change_us=after_us - before_us,
        before_calls=before_calls,
        after_calls=after_calls,
    )


def _stages(before: Summary, after: Summary) -> list[StageChange]:
    then, now = _medians(before), _medians(after)
    return [
        StageChange(
            stage=stage,
            before_us=then[stage],
            after_us=now[stage],
            ratio=now[stage] / then[stage] if then[stage] else 0.0,
        )
        for stage in sorted(then.keys() & now.keys())
    ]


def _medians(summary: Summary) -> dict[str, float]:
    durations: dict[str, list[float]] = defaultdict(list)
    for step in summary.steps:
        durations[step.stage].append(step.dur_us)
    return {stage: statistics.median(found) for stage, found in durations.items()}


def find_summary(path: Path) -> Summary:
    """Of a summary's file, or of ``DIR/ID``. OSError, or msgspec.DecodeError."""
    return read_summary(path if path.is_file() else summary_path(path.parent, path.name))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.difference")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    try:
        found = compare(find_summary(options.before), find_summary(options.after))
    except (OSError, msgspec.DecodeError) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

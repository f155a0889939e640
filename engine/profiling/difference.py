"""Two profiles side by side: what got slower, what is new, what is gone.

Path: two ``summary-<id>.json`` -> here -> the Profiles page, or by hand:

    python -m engine.profiling.difference BEFORE.json AFTER.json

Profiles differ in length, so operations are compared per recorded step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import defaultdict
from pathlib import Path

import msgspec

from engine.profiling.summary import Summary, read_summary


class OpChange(msgspec.Struct, frozen=True, kw_only=True):
    """Self time and calls per recorded step; 0 where the operation did not occur."""

    name: str
    cat: str
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
    """``ops``: largest change first. Shares are of the recorded time of all ranks."""

    before: str
    after: str
    stages: list[StageChange]
    ops: list[OpChange]
    busy_share: tuple[float, float]
    communication_share: tuple[float, float]


def compare(before: Summary, after: Summary) -> Difference:
    """What changed from ``before`` to ``after``."""
    then, now = _per_step(before), _per_step(after)
    changes = [_change(key, then.get(key), now.get(key)) for key in then.keys() | now.keys()]
    return Difference(
        before=before.profile_id,
        after=after.profile_id,
        stages=_stages(before, after),
        ops=sorted(changes, key=lambda change: (-abs(change.change_us), change.name)),
        busy_share=(before.busy_share, after.busy_share),
        communication_share=(before.communication_share, after.communication_share),
    )


def _per_step(summary: Summary) -> dict[tuple[str, str], tuple[float, float]]:
    """Self time and calls of each operation per recorded step, or in all if no step has a name."""
    steps = sum(rank.steps for rank in summary.ranks) or 1
    return {(op.cat, op.name): (op.self_us / steps, op.count / steps) for op in summary.top_ops}


def _change(
    key: tuple[str, str], then: tuple[float, float] | None, now: tuple[float, float] | None
) -> OpChange:
    (before_us, before_calls), (after_us, after_calls) = then or (0.0, 0.0), now or (0.0, 0.0)
    return OpChange(
        cat=key[0],
        name=key[1],
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


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.difference")
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    options = parser.parse_args()
    try:
        found = compare(read_summary(options.before), read_summary(options.after))
    except (OSError, msgspec.DecodeError) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 1
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())

from __future__ import annotations

import sys

import pytest

from engine.profiling.bench import PROFILE_ID, bench_merge, measure, write_synthetic
from engine.profiling.merge import merge
from engine.profiling.rules import check_trace


def test_the_synthetic_traces_merge_whole_and_keep_the_rules(tmp_path):
    write_synthetic(tmp_path, ranks=3, events=2_000)
    result = merge(tmp_path, PROFILE_ID)
    assert result.errors == [] and result.warnings == []
    assert result.ranks_found == ["dp0-tp0", "dp0-tp1", "dp1-tp0"]
    report = check_trace(tmp_path / f"merged-{PROFILE_ID}.trace.json.gz")
    assert report.violations == []
    assert report.events > result.events >= 6_000


def test_memory_does_not_grow_with_the_traces(tmp_path):
    """C10: the merge streams."""
    peaks = []
    for events in (40_000, 160_000):  # smaller ones end between two looks at their memory
        directory = tmp_path / str(events)
        directory.mkdir()
        rows = bench_merge(directory, peer=None, ranks=2, events=events, rounds=1)
        peaks.append(rows[2]["ours"])
    assert peaks[1] - peaks[0] < 15.0
    assert peaks[1] < 150.0


def test_a_command_that_fails_is_not_measured():
    with pytest.raises(RuntimeError, match="what went wrong"):
        measure([sys.executable, "-c", "import sys; sys.exit('what went wrong')"])

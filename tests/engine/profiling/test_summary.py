from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import NotFound
from engine.profiling.difference import compare
from engine.profiling.lanes import covered, self_times, union
from engine.profiling.summary import read_summary, summarize
from tests.engine.profiling.traces import PAIR, ProfileDir, pair_profile, span, step


def test_operations_are_ordered_by_their_self_time_over_all_ranks(tmp_path):
    pair_profile(tmp_path)
    summary = summarize(tmp_path, "p")
    assert [(op.name, op.count, op.self_us, op.total_us) for op in summary.top_ops] == [
        ("aten::mm", 4, 200.0, 240.0),
        ("gloo:all_reduce", 4, 80.0, 80.0),
        ("aten::copy_", 4, 40.0, 40.0),
    ]
    assert [op.communication for op in summary.top_ops] == [False, True, False]
    assert sum(op.share for op in summary.top_ops) == pytest.approx(1.0)


def test_busy_idle_and_communication_are_of_the_recorded_steps(tmp_path):
    pair_profile(tmp_path)
    summary = summarize(tmp_path, "p")
    rank = summary.ranks[0]
    assert (rank.window_us, rank.busy_us, rank.idle_us) == (200.0, 160.0, 40.0)
    assert (rank.communication_us, rank.outside_ops_us) == (40.0, 40.0)
    assert (summary.busy_share, summary.communication_share) == (0.8, 0.2)
    assert [(row.step, row.busy_us, row.communication_us) for row in summary.steps[:2]] == [
        (0, 80.0, 20.0),
        (1, 80.0, 20.0),
    ]


def test_with_device_events_a_rank_is_busy_while_its_device_is(tmp_path):
    made = ProfileDir(tmp_path, "p", PAIR[:1])
    events = [
        step(0, 0.0, 50.0),
        span("aten::mm", 0.0, 50.0),
        span("gemm", 40.0, 60.0, cat="kernel", pid=0, tid=7),
        span("copy", 90.0, 30.0, cat="gpu_memcpy", pid=0, tid=8),
    ]
    made.manifest(PAIR[0], [made.segment(PAIR[0], 0, events)])
    rank = summarize(tmp_path, "p").ranks[0]
    assert (rank.window_us, rank.busy_us, rank.idle_us) == (120.0, 80.0, 40.0)


def test_the_rank_that_others_wait_for_is_named(tmp_path):
    pair_profile(tmp_path, slow=15.0)
    (straggler,) = summarize(tmp_path, "p").stragglers
    assert (straggler.rank, straggler.group) == ("dp0-tp1", "dp0")
    assert (straggler.steps, straggler.slowest_in) == (2, 2)
    assert straggler.mean_excess_us == pytest.approx(15.0)


def test_equal_ranks_have_no_straggler(tmp_path):
    pair_profile(tmp_path)
    assert summarize(tmp_path, "p").stragglers == []


def test_the_largest_gap_is_a_step_with_what_the_capture_did_before_it(tmp_path):
    pair_profile(tmp_path)
    summary = summarize(tmp_path, "p")
    assert summary.largest_gap_us == 210.0
    assert summary.median_step_us == 80.0  # of the step that was not recorded


def test_a_segment_that_cannot_be_read_is_a_problem_and_the_rest_is_summarized(tmp_path):
    made = pair_profile(tmp_path)
    (tmp_path / f"{made.profile_id}-dp0-tp1-s000.trace.json.gz").write_bytes(b"no trace")
    summary = summarize(tmp_path, "p")
    assert summary.partial
    assert [problem.rank for problem in summary.problems] == ["dp0-tp1"]
    assert summary.ranks[0].steps == 2 and summary.ranks[1].steps == 0


def test_the_file_beside_the_trace_reads_back_as_it_was(tmp_path):
    pair_profile(tmp_path)
    summary = summarize(tmp_path, "p")
    assert read_summary(tmp_path / "summary-p.json") == summary
    longest = summary.timeline.blocks["dp0-tp0"][0]
    assert summary.timeline.names[longest[4]] == "decode[step=0 bs=2 toks=2]"


def test_a_thread_is_one_lane_of_the_timeline_in_all_segments(tmp_path):
    """Though another thread comes first in the second one; the span over the recording is none."""
    made = ProfileDir(tmp_path, "p", PAIR[:1])
    whole = span("PyTorch Profiler (0)", 0.0, 90.0, cat="Trace", pid="Spans", tid="PyTorch")
    first = [whole, span("aten::mm", 0.0, 50.0), span("other", 5.0, 1.0, tid=10)]
    second = [span("other", 100.0, 1.0, tid=10), span("aten::mm", 101.0, 50.0)]
    segments = [made.segment(PAIR[0], at, events) for at, events in enumerate((first, second))]
    made.manifest(PAIR[0], segments)
    timeline = summarize(tmp_path, "p").timeline
    lanes = {(timeline.names[name], lane) for _, _, lane, _, name in timeline.blocks["dp0-tp0"]}
    assert lanes == {("aten::mm", 0), ("other", 1)}


def test_nothing_to_summarize_is_said_so(tmp_path):
    with pytest.raises(NotFound):
        summarize(tmp_path, "p")
    command = [sys.executable, "-m", "engine.profiling.summary", str(tmp_path), "p"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "there is no trace of profile p" in done.stderr


def test_two_profiles_are_compared_per_step_with_the_largest_change_first(tmp_path):
    pair_profile(tmp_path)
    pair_profile(tmp_path, slow=15.0, profile_id="q")
    found = compare(summarize(tmp_path, "p"), summarize(tmp_path, "q"))
    assert [(op.name, op.change_us) for op in found.ops] == [
        ("aten::mm", 7.5),
        ("gloo:all_reduce", -7.5),
        ("aten::copy_", 0.0),
    ]
    assert [op.communication for op in found.ops] == [False, True, False]
    assert found.stages[0].ratio == 1.0
    assert found.communication_share == (0.2, 0.125)
    assert (found.median_step_us, found.largest_gap_us) == ((80.0, 80.0), (210.0, 210.0))
    assert found.problems == []
    files = [str(tmp_path / "summary-p.json"), str(tmp_path / "q")]
    command = [sys.executable, "-m", "engine.profiling.difference"]
    done = subprocess.run([*command, *files], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["after"] == "q"
    lost = subprocess.run([*command, *files[:1], "/nowhere/r"], capture_output=True, text=True)
    assert lost.returncode == 1 and lost.stderr.startswith("not compared: ")


def test_a_comparison_says_why_two_profiles_are_not_alike(tmp_path):
    pair_profile(tmp_path)
    (tmp_path / "q").mkdir()
    alone = ProfileDir(tmp_path / "q", "q", PAIR)
    alone.manifest(PAIR[0], [alone.segment(PAIR[0], 0, [span("aten::mm", 0.0, 5.0)])])
    found = compare(summarize(tmp_path, "p"), summarize(tmp_path / "q", "q"))
    assert found.problems == [
        "q is partial, missing dp0-tp1",
        "q names no steps: its times are of the whole trace",
        "they hold other ranks: dp0-tp0 dp0-tp1 and dp0-tp0",
    ]


small = st.integers(min_value=0, max_value=40)
intervals = st.lists(st.tuples(small, small), max_size=12)


@given(intervals, small, small)
def test_covered_time_equals_counting_it_unit_by_unit(spans, begin, length):
    start = np.array([float(at) for at, _ in spans])
    end = start + np.array([float(dur) for _, dur in spans])
    window = (np.array([float(begin)]), np.array([float(begin + length)]))
    by_unit = sum(
        any(at <= unit < at + dur for at, dur in spans) for unit in range(begin, begin + length)
    )
    assert covered(union(start, end), *window)[0] == by_unit


@given(st.recursive(small, lambda inner: st.lists(inner, max_size=4), max_leaves=20))
def test_self_times_of_a_lane_add_up_to_its_busy_time(tree):
    """A tree of calls: a number is a leaf of that length, a list a call around its parts."""
    spans: list[tuple[float, float]] = []

    def lay_out(node, at: float) -> float:
        end = at + node if isinstance(node, int) else at + 1.0
        for part in node if isinstance(node, list) else []:
            end = lay_out(part, end) + 1.0
        spans.append((at, end - at))
        return end

    lay_out(tree, 0.0)
    spans.sort(key=lambda one: (one[0], -one[1]))
    start = np.array([at for at, _ in spans])
    dur = np.array([length for _, length in spans])
    own, depth = self_times(start, dur, np.zeros(len(spans), dtype=np.int64))
    assert own.sum() == pytest.approx(dur.max())
    assert depth.max() <= len(spans) and (own >= 0).all()

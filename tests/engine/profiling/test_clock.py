from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.profiling.clock import offset_of
from engine.profiling.manifest import Anchor

times = st.integers(min_value=0, max_value=10**15)
slacks = st.integers(min_value=0, max_value=10**6)


@given(
    st.integers(min_value=-(10**18), max_value=10**18),
    st.lists(st.tuples(times, slacks, slacks, slacks), min_size=1, max_size=6),
)
def test_the_true_offset_lies_within_the_stated_uncertainty(offset, markers):
    """C25."""
    anchors = [
        Anchor(
            monotonic_before_ns=start + offset - before,
            monotonic_after_ns=start + length + offset + after,
            trace_start_ns=start,
            trace_end_ns=start + length,
        )
        for start, before, length, after in markers
    ]
    found = offset_of(anchors)
    assert abs(found.ns - offset) <= found.uncertainty_ns
    widest = min(before + after for _, before, _, after in markers)
    assert found.uncertainty_ns <= widest // 2 + 1


@given(st.integers(min_value=1, max_value=10**9))
def test_clocks_that_drift_widen_the_uncertainty_to_cover_both_ends(drift):
    anchors = [
        Anchor(monotonic_before_ns=at, monotonic_after_ns=at, trace_start_ns=0, trace_end_ns=0)
        for at in (0, drift)
    ]
    found = offset_of(anchors)
    assert found.ns - found.uncertainty_ns <= 0
    assert found.ns + found.uncertainty_ns >= drift

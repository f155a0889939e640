from __future__ import annotations

from math import nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.profiling import events, part
from engine.profiling.events import Event, FlowPairs
from engine.profiling.part import Lanes, PartSegment, Rewriter
from engine.profiling.reader import TraceError

DAYS_100_NS = 8_640_000 * 10**9


def rewriter(shift_ns: int, base_ns: int = 0) -> Rewriter:
    segment = PartSegment(path="", sha256="", events=-1, namespace=0, shift_ns=shift_ns)
    return Rewriter(Lanes(1), segment, base_ns)


@given(
    st.integers(min_value=0, max_value=DAYS_100_NS),
    st.integers(min_value=0, max_value=10**13),
    st.integers(min_value=10**18, max_value=2 * 10**18),
)
def test_a_time_is_moved_without_losing_a_nanosecond(trace_ns, apart_ns, base_ns):
    """Trace times as torch writes them: microseconds with three decimals, base taken away."""
    start_ns = base_ns + trace_ns - apart_ns
    text = b'[{"ph":"X","ts":%d.%03d}]' % divmod(trace_ns, 1000)
    batch = msgspec.json.decode(text, type=list[Event])
    (moved,) = rewriter(-start_ns, base_ns).rewrite(batch)
    assert round(moved.ts * 1000) == apart_ns
    assert len(repr(moved.ts).partition(".")[2]) <= 3


def test_an_event_without_a_time_is_refused():
    with pytest.raises(TraceError, match="no time"):
        rewriter(0).rewrite([Event(ph="X", ts=nan)])


def test_a_trace_with_too_many_threads_is_refused_before_it_fills_the_memory(monkeypatch):
    monkeypatch.setattr(part, "MAX_LANES", 10)
    with pytest.raises(TraceError, match="more than 10 threads"):
        rewriter(0).rewrite([Event(ph="X", ts=1.0, pid=1, tid=tid) for tid in range(11)])


@given(st.lists(st.tuples(st.sampled_from("stf"), st.integers(0, 4)), max_size=30))
def test_exactly_the_flows_with_both_ends_pass_and_in_the_order_of_each_flow(pushed):
    pairs = FlowPairs()
    given_events = [Event(ph=phase, id=number, ts=at) for at, (phase, number) in enumerate(pushed)]
    passed = [event for event in map(pairs.push, given_events) for event in event]
    ends = {number: {phase for phase, other in pushed if other == number} for _, number in pushed}
    whole = [event for event in given_events if {"s", "f"} <= ends[event.id]]
    assert sorted(passed, key=lambda event: event.ts) == whole
    for number in ends:
        times = [event.ts for event in passed if event.id == number]
        assert times == sorted(times)
    assert pairs.unpaired == len(given_events) - len(whole)


def test_flows_beyond_the_bound_pass_unchecked_and_none_is_lost(monkeypatch):
    monkeypatch.setattr(events, "MAX_TRACKED_FLOWS", 3)
    pairs = FlowPairs()
    given_events = [Event(ph="s", id=number) for number in range(8)]
    passed = [event for event in map(pairs.push, given_events) for event in event]
    assert passed == given_events
    assert not pairs.checked and pairs.unpaired == 0


@pytest.mark.parametrize("axis_size", [1, 99, 100, 5000])
def test_pids_of_neighbouring_ranks_never_meet_however_many_ranks_there_are(axis_size):
    last = Lanes(axis_size)
    first_of_next = Lanes(axis_size + 1)
    for number in range(part.PIDS_PER_RANK):
        highest = last.place(f"process {number}", 0)[0]
    assert highest < first_of_next.place(0, 0)[0] < 2**31
    with pytest.raises(TraceError, match="more than 1000 processes"):
        last.place("one more", 0)

from __future__ import annotations

import pytest

from engine.profiling.rules import check_trace
from tests.engine.profiling.traces import flow, named, span, write_trace

GOOD = [named(9, "python"), span("op", 1.0, 2.0), flow("s", 1, 1.0), flow("f", 1, 2.0)]


def verdict(tmp_path, events) -> list[str]:
    return check_trace(write_trace(tmp_path / "t.json", events)).violations


def test_a_good_trace_passes(tmp_path):
    thread = {"pid": 9, "tid": 9}
    pairs = [
        {"ph": "B", "name": "a", "ts": 1, **thread},
        {"ph": "E", "ts": 2, **thread},
        {"ph": "b", "cat": "c", "id": 1, "ts": 1, **thread},
        {"ph": "e", "cat": "c", "id": 1, "ts": 3, **thread},
    ]
    assert verdict(tmp_path, GOOD + pairs) == []


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        ({"ph": "Q", "pid": 9, "tid": 9, "ts": 1}, "event 4: ph 'Q' is no phase"),
        (span("op", 1.0, -1.0), "event 4: dur -1.0 is not a number of at least 0"),
        (span("op", 1.0, None), "event 4: dur None is not"),
        (span("op", "1", 1.0), "event 4: ts '1' is not a number"),
        (span("op", 1.0, 1.0, pid="[TP00] 9"), "pid '[TP00] 9' is not an integer"),
        (span("op", 1.0, 1.0, tid=True), "tid True is not an integer"),
        (span("op", 1.0, 1.0, pid=10), "process 10 has events and no name"),
        (named(9, "again"), "event 4: metadata behind other events"),
        (flow("s", 2, 1.0), "1 flows lack their start or their finish"),
        (flow("f", 2, 1.0), "1 flows lack their start or their finish"),
        ({"ph": "E", "pid": 9, "tid": 9, "ts": 1}, "an end (E) without its begin"),
        ({"ph": "B", "name": "a", "pid": 9, "tid": 9, "ts": 1}, "open event(s) without an end"),
    ],
)
def test_each_rule_names_the_event_that_breaks_it(tmp_path, event, sentence):
    found = verdict(tmp_path, [*GOOD, event])
    assert len(found) == 1 and sentence in found[0]


def test_a_file_that_is_no_trace_is_a_violation_and_not_a_crash(tmp_path):
    path = tmp_path / "t.json"
    path.write_bytes(b"\x1f\x8b not gzip")
    report = check_trace(path)
    assert not report.ok and report.violation_count == 1
    assert not check_trace(tmp_path / "none").ok

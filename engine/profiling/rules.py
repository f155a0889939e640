"""The written rules of a good trace, checked in one pass.

Path: any trace file, above all ``merged-<id>.trace.json.gz`` -> here -> tests, console, or by hand:

    python -m engine.profiling.rules FILE

1. The file is one JSON document (gzip or plain, UTF-8) with a list ``traceEvents``.
2. ``ph`` is a phase of the Chrome trace format.
3. ``ts`` is a finite number of microseconds; a complete event (X) has a ``dur`` of at least 0.
4. ``pid`` and ``tid`` are integers.
5. Metadata events stand in front of all others, and name every process that has events.
6. Arrows are whole: each flow id has a start (s) and a finish (f), or neither.
7. Begin and end events (B, E) pair within their thread, and async ones (b, e) by their id.

Memory grows with the number of distinct flow ids, by about 100 bytes each, and with nothing else.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from engine.profiling.reader import TraceError, TraceReader, open_trace

PHASES = frozenset("BEXiICbneSTpFstfPNODMVvRca(),=")
SHOWN = 50  # violations that are kept in words; all are counted
FLOW_ENDS = {"s": 1, "t": 0, "f": 2}


class RuleReport(msgspec.Struct, kw_only=True):
    """``violations``: the first ``SHOWN`` of ``violation_count``, each naming its event."""

    events: int = 0
    violation_count: int = 0
    violations: list[str] = []

    @property
    def ok(self) -> bool:
        return self.violation_count == 0


def check_trace(path: Path) -> RuleReport:
    """Checks a whole file; an unreadable one is a violation too."""
    checker = RuleChecker()
    try:
        with open_trace(path) as stream:
            for batch in TraceReader(stream, msgspec.json.Decoder(list[dict[str, Any]])):
                for event in batch:
                    checker.push(event)
    except TraceError as error:
        checker.violate(str(error))
    checker.close()
    return checker.report


class RuleChecker:
    """Takes events in file order (``push``), then ``close``; the verdict is in ``report``."""

    def __init__(self) -> None:
        self.report = RuleReport()
        self._named: set[Any] = set()
        self._unnamed: set[int] = set()
        self._metadata_over = False
        self._flows: dict[int, int] = {}  # hash of the flow -> bits of FLOW_ENDS
        self._open: Counter[tuple[Any, ...]] = Counter()

    def push(self, event: dict[str, Any]) -> None:
        phase = event.get("ph")
        self._check(isinstance(phase, str) and phase in PHASES, f"ph {phase!r} is no phase")
        for name in ("pid", "tid"):
            value = event.get(name)
            self._check(type(value) is int, f"{name} {value!r} is not an integer")
        if phase == "M":
            self._check(not self._metadata_over, "metadata behind other events")
            if event.get("name") == "process_name":
                self._named.add(event.get("pid"))
        else:
            self._metadata_over = True
            self._check_times(event, phase)
            if (pid := event.get("pid")) not in self._named and type(pid) is int:
                self._unnamed.add(pid)
            self._note_pairs(event, phase)
        self.report.events += 1

    def close(self) -> None:
        """Rules that only the end of the file can decide."""
        for pid in self._unnamed:
            self.violate(f"process {pid!r} has events and no name")
        whole = FLOW_ENDS["s"] | FLOW_ENDS["f"]
        half = sum(1 for ends in self._flows.values() if ends != whole)
        if half:
            self.violate(f"{half} flows lack their start or their finish", half)
        for key, count in self._open.items():
            if count > 0:
                self.violate(f"{count} open event(s) without an end in {key}", count)

    def violate(self, sentence: str, count: int = 1) -> None:
        self.report.violation_count += count
        if len(self.report.violations) < SHOWN:
            self.report.violations.append(sentence)

    def _check(self, good: bool, sentence: str) -> None:
        if not good:
            self.violate(f"event {self.report.events}: {sentence}")

    def _check_times(self, event: dict[str, Any], phase: object) -> None:
        ts = event.get("ts")
        self._check(_is_number(ts), f"ts {ts!r} is not a number")
        if phase == "X":
            dur = event.get("dur")
            good = dur is not None and _is_number(dur) and dur >= 0
            self._check(good, f"dur {dur!r} is not a number of at least 0")

    def _note_pairs(self, event: dict[str, Any], phase: object) -> None:
        if phase in FLOW_ENDS:
            self._check("id" in event, "a flow event without an id")
            flow = hash((event.get("cat"), event.get("name"), str(event.get("id"))))
            self._flows[flow] = self._flows.get(flow, 0) | FLOW_ENDS[str(phase)]
        elif phase in ("B", "b"):
            self._open[_pair_key(event)] += 1
        elif phase in ("E", "e"):
            key = _pair_key(event)
            self._check(self._open[key] > 0, f"an end ({phase}) without its begin")
            self._open[key] -= 1


def _pair_key(event: dict[str, Any]) -> tuple[Any, ...]:
    """What a begin and its end share: the thread, or category and id of an async event."""
    if event["ph"] in "BE":
        return ("thread", event.get("pid"), event.get("tid"))
    return ("async", event.get("cat"), str(event.get("id", event.get("id2"))))


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.profiling.rules")
    parser.add_argument("file", type=Path)
    report = check_trace(parser.parse_args().file)
    print(msgspec.json.format(msgspec.json.encode(report)).decode())
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())

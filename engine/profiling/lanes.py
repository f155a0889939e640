"""Time of one segment, taken apart: which operation had it, on which lane, at which depth.

Path: reader.py -> here -> summary.py. Needs 28 bytes per event of the segment it works on.

An event of a lane (thread or stream) lies inside the one it was called from. Its self time is its
duration without the events directly inside it, so the self times of a lane add up to its busy time.
"""

from __future__ import annotations

import heapq
import re
from array import array
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.profiling.pack import MARKER
from engine.profiling.reader import TraceReader, base_ns, open_trace

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Intervals = tuple[Floats, Floats]  # starts and ends, disjoint, in order

Lanes = dict[tuple[int | str, int | str], int]  # (pid, tid) of a rank -> its number
Block = tuple[float, float, int, int, int]  # start, duration, lane, depth, number of the name

MAX_BLOCKS = 2_000  # longest spans of one rank that are kept for the timeline

STEP = re.compile(r"(prefill|decode)\[step=(\d+) bs=(\d+) toks=(\d+)\]")
COMMUNICATION = re.compile(
    r"nccl|gloo|c10d|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|broadcast|\bsend\b|\brecv\b",
    re.IGNORECASE,
)
DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
NO_WORK = frozenset({"user_annotation", "gpu_user_annotation", "python_function", ""})


class Op(msgspec.Struct):
    """What the summary needs of an event; microseconds."""

    ph: str
    cat: str = ""
    name: str = ""
    pid: int | str = ""
    tid: int | str = ""
    ts: float = nan
    dur: float = 0.0


@dataclass(frozen=True, slots=True)
class Step:
    """One annotated forward step; microseconds on the profile's scale."""

    step: int
    stage: str
    rows: int
    tokens: int
    start_us: float
    dur_us: float


class Names:
    """Numbers for (category, name) pairs, shared by all ranks of a profile."""

    def __init__(self) -> None:
        self.pairs: list[tuple[str, str]] = []
        self._numbers: dict[tuple[str, str], int] = {}
        self._communication: list[bool] = []

    def number(self, cat: str, name: str) -> int:
        found = self._numbers.get((cat, name))
        if found is None:
            found = self._numbers[cat, name] = len(self.pairs)
            self.pairs.append((cat, name))
            self._communication.append(COMMUNICATION.search(name) is not None)
        return found

    def is_communication(self, number: int) -> bool:
        return self._communication[number]

    def communication(self) -> Flags:
        """By number: whether it is a collective or a transfer between ranks."""
        return np.array(self._communication, dtype=bool)

    def of_kinds(self, kinds: frozenset[str]) -> Flags:
        """By number: whether its category is one of ``kinds``."""
        return np.array([cat in kinds for cat, _ in self.pairs], dtype=bool)

    def work_numbers(self) -> list[int]:
        """Numbers of operations, without annotations."""
        return [number for number, (cat, _) in enumerate(self.pairs) if cat not in NO_WORK]

    def short(self, characters: int) -> list[str]:
        return [name[:characters] for _, name in self.pairs]


@dataclass(kw_only=True)
class Spans:
    """Complete events of one segment as columns, sorted by lane, start, longest first."""

    start: Floats
    dur: Floats
    lane: Ints
    name: Ints
    own: Floats = field(init=False)  # self time
    depth: Ints = field(init=False)

    def __post_init__(self) -> None:
        order = np.lexsort((-self.dur, self.start, self.lane))
        self.start, self.dur = self.start[order], self.dur[order]
        self.lane, self.name = self.lane[order], self.name[order]
        self.own, self.depth = self_times(self.start, self.dur, self.lane)

    @property
    def end(self) -> Floats:
        return self.start + self.dur


def self_times(start: Floats, dur: Floats, lane: Ints) -> tuple[Floats, Ints]:
    """Self time and nesting depth of sorted spans.

    A child that ends after its parent (clocks are read at different moments) takes only what it
    shares with the parent away from it.
    """
    own, depths = dur.tolist(), [0] * len(dur)
    open_ends: list[float] = []
    open_at: list[int] = []
    previous = -1
    ends = (start + dur).tolist()
    for at, (begins, number) in enumerate(zip(start.tolist(), lane.tolist(), strict=True)):
        if number != previous:
            open_ends.clear()
            open_at.clear()
            previous = number
        while open_ends and begins >= open_ends[-1]:
            open_ends.pop()
            open_at.pop()
        if open_ends:
            own[open_at[-1]] -= min(ends[at], open_ends[-1]) - begins
            depths[at] = len(open_ends)
        open_ends.append(ends[at])
        open_at.append(at)
    return np.maximum(np.array(own, dtype=np.float64), 0.0), np.array(depths, dtype=np.int64)


def read_spans(
    path: Path, sha256: str, shift_ns: int, names: Names, lanes: Lanes
) -> tuple[Spans, list[Step]]:
    """One segment. ``shift_ns`` leads from its trace clock to the profile's scale; ``lanes`` are
    those of all segments of the rank. TraceError.

    The span that torch draws over a whole recording says nothing, and is left out.
    """
    start, dur = array("d"), array("d")
    lane, name = array("q"), array("q")
    steps = []
    with open_trace(path, sha256) as stream:
        reader = TraceReader(stream, msgspec.json.Decoder(list[Op]))
        shift_us = (base_ns(reader.envelope) + shift_ns) / 1000.0
        for batch in reader:
            for op in batch:
                if op.ph != "X" or op.cat == "Trace" or op.name.startswith(MARKER):
                    continue
                start.append(op.ts + shift_us)
                dur.append(op.dur)
                lane.append(lanes.setdefault((op.pid, op.tid), len(lanes)))
                name.append(names.number(op.cat, op.name))
                if op.cat == "user_annotation" and (found := STEP.fullmatch(op.name)):
                    steps.append(_step(found, op.ts + shift_us, op.dur))
    spans = Spans(
        start=np.frombuffer(start), dur=np.frombuffer(dur), lane=_ints(lane), name=_ints(name)
    )
    return spans, steps


def _step(found: re.Match[str], start_us: float, dur_us: float) -> Step:
    number, rows, tokens = (int(found[at]) for at in (2, 3, 4))
    return Step(number, found[1], rows, tokens, start_us, dur_us)


def _ints(column: array[int]) -> Ints:
    return np.frombuffer(column, dtype=np.int64)


def union(start: Floats, end: Floats) -> Intervals:
    """The same time as disjoint intervals in order."""
    if not len(start):
        return start, end
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reach[last]


def covered(intervals: Intervals, begin: Floats, end: Floats) -> Floats:
    """How much of each window [begin, end] the disjoint ``intervals`` cover."""
    starts, ends = intervals
    if not len(starts):
        return np.zeros(len(begin))
    before = np.concatenate(([0.0], np.cumsum(ends - starts)))

    def until(at: Floats) -> Floats:
        """Covered time before ``at``."""
        index = np.searchsorted(starts, at, side="right")
        inside = np.minimum(at, ends[np.maximum(index - 1, 0)]) - starts[np.maximum(index - 1, 0)]
        whole: Floats = before[np.maximum(index - 1, 0)]
        return np.where(index > 0, whole + np.maximum(inside, 0.0), 0.0)

    return until(end) - until(begin)


class OpTotals:
    """Sums by operation number, over all ranks; microseconds."""

    def __init__(self) -> None:
        self.count: list[int] = []
        self.own: list[float] = []
        self.total: list[float] = []
        self.longest: list[float] = []

    def add(self, spans: Spans, numbers: int) -> None:
        """``numbers``: how many operation numbers exist by now."""
        longest = np.zeros(numbers)
        np.maximum.at(longest, spans.name, spans.dur)
        self.count = _sum(self.count, np.bincount(spans.name, minlength=numbers))
        self.own = _sum(self.own, np.bincount(spans.name, spans.own, minlength=numbers))
        self.total = _sum(self.total, np.bincount(spans.name, spans.dur, minlength=numbers))
        known = np.array(self.longest + [0.0] * (numbers - len(self.longest)))
        self.longest = np.maximum(known, longest).tolist()


def _sum(known: list[Any], more: npt.NDArray[Any]) -> list[Any]:
    found: list[Any] = more.tolist()
    return [a + b for a, b in zip(known, found, strict=False)] + found[len(known) :]


class RankTotals:
    """What the segments of one rank add up to; microseconds."""

    def __init__(self, names: Names, ops: OpTotals) -> None:
        self.names = names
        self.lanes: Lanes = {}
        self._ops = ops
        self._blocks: list[Block] = []
        self.events = 0
        self.window_us = self.busy_us = self.communication_us = self.outside_ops_us = 0.0
        self.steps: list[tuple[Step, float, float]] = []  # with busy and communication time

    def add(self, segment: tuple[Spans, list[Step]]) -> None:
        spans, steps = segment
        self._ops.add(spans, len(self.names.pairs))
        self.events += len(spans.dur)
        on_device = self.names.of_kinds(DEVICE_KINDS)[spans.name]
        working = on_device if on_device.any() else ~self.names.of_kinds(NO_WORK)[spans.name]
        talking = self.names.communication()[spans.name] & working
        busy = union(spans.start[working], spans.end[working])
        talk = union(spans.start[talking], spans.end[talking])
        self._add_window(spans, steps, busy, talk, on_device)
        self._add_steps(steps, busy, talk)
        self._add_blocks(spans)

    def blocks(self) -> list[Block]:
        """The longest spans in order of time."""
        return sorted(self._blocks)

    def _add_window(
        self, spans: Spans, steps: list[Step], busy: Intervals, talk: Intervals, on_device: Flags
    ) -> None:
        """A window for each step; with a device, whose work outlasts the step, one for all."""
        if not len(spans.dur):
            return
        if steps and not on_device.any():
            begin = np.array([step.start_us for step in steps])
            end = begin + np.array([step.dur_us for step in steps])
        else:
            begin, end = np.array([spans.start.min()]), np.array([spans.end.max()])
        self.window_us += float((end - begin).sum())
        self.busy_us += float(covered(busy, begin, end).sum())
        self.communication_us += float(covered(talk, begin, end).sum())

    def _add_steps(self, steps: list[Step], busy: Intervals, talk: Intervals) -> None:
        begin = np.array([step.start_us for step in steps])
        end = begin + np.array([step.dur_us for step in steps])
        busy_us, talk_us = covered(busy, begin, end).tolist(), covered(talk, begin, end).tolist()
        self.steps += zip(steps, busy_us, talk_us, strict=True)
        self.outside_ops_us += sum(step.dur_us for step in steps) - sum(busy_us)

    def _add_blocks(self, spans: Spans) -> None:
        longest = np.argsort(-spans.dur, kind="stable")[:MAX_BLOCKS]
        columns = (spans.start, spans.dur, spans.lane, spans.depth, spans.name)
        rows = zip(*(column[longest].tolist() for column in columns), strict=True)
        self._blocks = heapq.nlargest(MAX_BLOCKS, [*self._blocks, *rows], key=lambda row: row[1])

"""Small traces and profile directories for the tests, in the layouts that occur."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from engine.artifacts import Rank
from engine.profiling.manifest import (
    Anchor,
    ProfileFile,
    RankManifest,
    Segment,
    StepMark,
    write_manifest,
    write_profile,
)

BASE_NS = 1_790_857_026_000_000_000
PAIR = [Rank(dp=0, tp=0), Rank(dp=0, tp=1)]


def span(name: str, ts: float, dur: float, *, pid: Any = 9, tid: Any = 9, **more: Any) -> dict:
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": ts,
        "dur": dur,
    } | more


def named(pid: Any, name: str) -> dict:
    return {
        "ph": "M",
        "name": "process_name",
        "pid": pid,
        "tid": 0,
        "ts": 0,
        "args": {"name": name},
    }


def flow(phase: str, number: Any, ts: float, *, pid: Any = 9, tid: Any = 9) -> dict:
    return {
        "ph": phase,
        "cat": "ac2g",
        "name": "ac2g",
        "id": number,
        "pid": pid,
        "tid": tid,
        "ts": ts,
    }


def document(events: list[dict], **head: Any) -> dict:
    return {"schemaVersion": 1, "baseTimeNanoseconds": BASE_NS, **head, "traceEvents": events}


def write_trace(path: Path, events: list[dict], **head: Any) -> Path:
    text = json.dumps(document(events, **head)).encode()
    path.write_bytes(gzip.compress(text, 1) if path.name.endswith(".gz") else text)
    return path


def read_merged(path: str | Path) -> dict:
    return json.loads(gzip.decompress(Path(path).read_bytes()))


class ProfileDir:
    """Builds the directory of one profile as our own ranks would leave it."""

    def __init__(self, root: Path, profile_id: str, ranks: list[Rank]) -> None:
        self.root = root
        self.profile_id = profile_id
        self.ranks = ranks
        write_profile(root, ProfileFile(profile_id=profile_id, ranks=ranks))

    def segment(
        self, rank: Rank, number: int, events: list[dict], *, anchors: tuple[Anchor, ...] = ()
    ) -> Segment:
        path = self.root / f"{self.profile_id}-{rank.name}-s{number:03d}.trace.json.gz"
        data = write_trace(path, events).read_bytes()
        return Segment(
            path=path.name,
            bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            events=len(events),
            anchors=anchors,
        )

    def manifest(self, rank: Rank, segments: list[Segment], **more: Any) -> RankManifest:
        fields = {"complete": True, "boot_id": "boot", "host": "host"} | more
        manifest = RankManifest(profile_id=self.profile_id, rank=rank, segments=segments, **fields)
        write_manifest(self.root, manifest)
        return manifest


def anchor(trace_ns: int, *, offset_ns: int, width_ns: int = 2_000) -> Anchor:
    """A marker of 1 us at ``trace_ns``; the monotonic clock is ``offset_ns`` ahead."""
    slack = (width_ns - 1_000) // 2
    return Anchor(
        monotonic_before_ns=trace_ns + offset_ns - slack,
        monotonic_after_ns=trace_ns + offset_ns + 1_000 + slack,
        trace_start_ns=trace_ns,
        trace_end_ns=trace_ns + 1_000,
    )


def step(number: int, start: float, dur: float, stage: str = "decode") -> dict:
    name = f"{stage}[step={number} bs=2 toks=2]"
    return span(name, start, dur, cat="user_annotation")


def pair_profile(root, *, slow: float = 0.0, profile_id: str = "p") -> ProfileDir:
    """Two ranks, two steps of 100 us: 60 of mm (10 of them in copy), then the collective."""
    made = ProfileDir(root, profile_id, PAIR)
    for rank in PAIR:
        late = slow if rank.tp == 1 else 0.0
        events = [named(9, "python")]
        for number in range(2):
            at = 1000.0 + 200 * number
            events += [
                step(number, at, 100.0),
                span("aten::mm", at + 10, 60.0 + late),
                span("aten::copy_", at + 20, 10.0),
                span("gloo:all_reduce", at + 70 + late, 20.0 - late),
                span("quarterdeck.clock.start.0.0", at, 50.0, cat="user_annotation"),
            ]
        segment = made.segment(rank, 0, events, anchors=(anchor(BASE_NS, offset_ns=0),))
        marks = [
            StepMark(
                step=n,
                stage="decode",
                rows=2,
                tokens=2,
                start_ns=0,
                end_ns=dur_ns,
                pause_ns=pause_ns,
                recorded=recorded,
            )
            for n, (dur_ns, pause_ns, recorded) in enumerate(
                [(100_000, 50_000, True), (120_000, 90_000, True), (80_000, 10_000, False)]
            )
        ]
        made.manifest(rank, [segment], steps=marks, final_pause_ns=20_000)
    return made

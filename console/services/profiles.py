"""The library of profiles: rows, what the pages show of them, lanes out of a summary.

Path: effects.py writes rows here as jobs begin and end; api/recordings.py reads them.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from console.models import Job, Profile
from console.services import recordings
from console.services.programs import run_program
from console.services.recording_actions import Profile as ProfileAction
from console.services.recordings import place_of
from engine.errors import NotFound

TOP_OPS = 40
COMPARED_OPS = 200
DEPTHS = 4  # rows of the timeline per rank
SUMMARIES_KEPT = 8
State = Profile.State


def begun(action: ProfileAction, job: Job) -> None:
    recordings.begun(Profile, action, job)


def ended(action: ProfileAction, job: Job) -> bool:
    """True if there is something to merge, and somebody asked for it."""
    row = Profile.objects.filter(recording_id=action.recording_id).first()
    if row is None or not recordings.note_ended(row, job, State.READY):
        if row is not None and row.pk is not None:
            row.save()
        return False
    row.bytes = sum(said.get("bytes", 0) for said in row.ranks.values())
    row.steps = max((said.get("steps", 0) for said in row.ranks.values()), default=0)
    if action.merge_profiles:
        row.state = State.MERGING
    row.save()
    return action.merge_profiles


def merged(name: str, job: Job) -> None:
    """The merge's job has ended, well or not."""
    row = Profile.objects.filter(recording_id=name).first()
    if row is None:
        return
    merge = job.result.get("merge") or {}
    if job.state != Job.State.DONE or not merge.get("merged"):
        row.state, row.message = State.FAILED, merge.get("label") or job.message
    else:
        row.state = State.PARTIAL if merge["partial"] else State.READY
        row.message, row.missing = merge["label"], merge["missing"]
        gap = job.result["summary"]["largest_gap_us"]
        row.largest_gap_ms = None if gap is None else gap / 1e3
        row.merge = merge
        row.bytes = sum(path.stat().st_size for path in recordings.files_of(row))
    row.save()


# ---------------------------------------------------------------- reading


def page(*, offset: int, size: int, state: str, words: str, pinned: bool = False) -> dict[str, Any]:
    rows = Profile.objects.all().matching(state=state, words=words, pinned=pinned)
    return recordings.page(rows, as_json, name="profiles", offset=offset, size=size)


def as_json(row: Profile) -> dict[str, Any]:
    found = row.merge.get("ranks_found")
    expected = row.merge.get("ranks_expected") or list(row.ranks)
    return {
        "id": row.recording_id,
        "created_at": row.created_at.timestamp(),
        "state": row.state,
        "ranks_found": len(found) if found is not None else len(row.ranks) - len(row.missing),
        "ranks_expected": len(expected),
        "missing": row.missing,
        "steps": row.steps,
        "bytes": row.bytes,
        "pinned": row.pinned,
        "expired": recordings.expired(row),
        "note": row.note,
        "actor": row.actor,
        "largest_gap_ms": row.largest_gap_ms,
    }


def as_detail(row: Profile) -> dict[str, Any]:
    clock = row.merge.get("clock") or {}
    files = recordings.files_of(row)
    base = f"/api/profiles/{row.recording_id}/files"
    merged_file = next((path.name for path in files if path.name.startswith("merged-")), None)
    return {
        **as_json(row),
        "reason": row.reason,
        "message": row.message,
        "ranks": [_rank(name, said, clock) for name, said in row.ranks.items()]
        or _under_way(row, files),
        "files": [
            {"name": path.name, "bytes": path.stat().st_size, "url": f"{base}/{path.name}"}
            for path in files
        ],
        "viewer_url": _viewer_url(row, f"{base}/{merged_file}") if merged_file else None,
        "clock_method": clock.get("method"),
    }


def _viewer_url(row: Profile, trace_url: str) -> str:
    """speedscope reads the trace's address from the fragment."""
    fragment = urlencode({"profileURL": trace_url, "title": row.recording_id})
    return f"/profiles/{row.recording_id}/viewer/#{fragment}"


def _rank(name: str, said: dict[str, Any], clock: dict[str, Any]) -> dict[str, Any]:
    dp, tp = place_of(name)
    known = bool(clock) and name not in clock["uncalibrated"]
    within_ns = clock.get("uncertainty_ns")
    return {
        "dp": dp,
        "tp": tp,
        "state": "failed" if said["error"] else "done",
        "message": said["error"] or said.get("reason", ""),
        "events": said.get("events", 0),
        "bytes": said.get("bytes", 0),
        "offset_us": 0 if known and within_ns is not None else None,
        "uncertainty_us": within_ns / 1e3 if known and within_ns is not None else None,
    }


class _Manifest(msgspec.Struct):
    """Of a rank's manifest, what says that it has written everything."""

    complete: bool = False


def _under_way(row: Profile, files: list[Path]) -> list[dict[str, Any]]:
    """What each rank has written so far."""
    names = row.job.result.get("ranks", []) if row.job is not None else []
    return [_writing(name, files, f"{row.recording_id}-{name}") for name in names]


def _writing(name: str, files: list[Path], stem: str) -> dict[str, Any]:
    dp, tp = place_of(name)
    own = [path for path in files if path.name.startswith(stem)]
    manifests = [path for path in own if path.name == f"{stem}.manifest.json"]
    is_over = any(
        msgspec.json.decode(path.read_bytes(), type=_Manifest).complete for path in manifests
    )
    segments = len(own) - len(manifests)
    return {
        "dp": dp, "tp": tp, "state": "done" if is_over else "running",
        "message": f"{segments} segments written", "events": None,
        "bytes": sum(path.stat().st_size for path in own),
        "offset_us": None, "uncertainty_us": None,
    }  # fmt: skip


def summary_of(row: Profile) -> dict[str, Any] | None:
    """What the page shows of it, or None while there is none."""
    summary = _summary(row)
    if summary is None:
        return None
    late = {one["rank"]: one["mean_excess_us"] for one in summary["stragglers"]}
    return {
        "top_ops": [
            {"name": op["name"], "count": op["count"], "total_us": op["self_us"],
             "share": op["share"]}
            for op in summary["top_ops"][:TOP_OPS]
        ],
        "ranks": [_busy(rank, late) for rank in summary["ranks"]],
    }  # fmt: skip


def _busy(rank: dict[str, Any], late: dict[str, float]) -> dict[str, Any]:
    window = rank["window_us"] or 1.0
    return {
        "name": rank["rank"],
        "busy": rank["busy_us"] / window,
        "communication": rank["communication_us"] / window,
        "idle": rank["idle_us"] / window,
        "straggler_us": late.get(rank["rank"], 0.0),
    }


def _summary_path(row: Profile) -> Path:
    return Path(row.directory) / f"summary-{row.recording_id}.json"


def _summary(row: Profile) -> dict[str, Any] | None:
    path = _summary_path(row)
    try:
        return read_summary(path, path.stat().st_mtime_ns)
    except FileNotFoundError:
        return None


@lru_cache(maxsize=SUMMARIES_KEPT)
def read_summary(path: Path, mtime_ns: int) -> dict[str, Any]:
    """A summary's file as it was at ``mtime_ns``."""
    decoded: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return decoded


async def compare(a: Profile, b: Profile) -> dict[str, Any]:
    """As ``profile-compare.js`` shows it: per step, B against A, the largest change first.

    Raises ``NotFound`` for a profile that was not merged.
    """
    for row in (a, b):
        if not _summary_path(row).is_file():
            raise NotFound(
                f"profile {row} has no summary: it was not merged, or its files are gone"
            )
    files = (str(_summary_path(row)) for row in (a, b))
    found = await run_program("engine.profiling.difference", *files)
    found["left_out"] = max(0, len(found["ops"]) - COMPARED_OPS)
    found["ops"] = found["ops"][:COMPARED_OPS]
    return found | {"a": as_json(a), "b": as_json(b)}


# ---------------------------------------------------------------- lanes


def lanes(
    row: Profile, *, begin_us: float | None, end_us: float | None, pixels: int
) -> dict[str, Any]:
    """The longest spans of each rank between two times, thinned out to ``pixels``.

    Raises ``NotFound`` while there is no summary.
    """
    summary = _summary(row)
    if summary is None:
        raise NotFound(f"{row} has no summary yet")
    timeline = summary["timeline"]
    blocks: dict[str, list[list[Any]]] = timeline["blocks"]
    starts = [block[0] for spans in blocks.values() for block in spans]
    ends = [block[0] + block[1] for spans in blocks.values() for block in spans]
    whole = (min(starts, default=0.0), max(ends, default=1.0))
    begin = whole[0] if begin_us is None else begin_us
    end = whole[1] if end_us is None else max(end_us, begin + 1e-3)
    pixel_us = (end - begin) / pixels
    shown = [
        lane
        for rank, spans in blocks.items()
        for lane in _lanes_of(rank, spans, begin, end, pixel_us)
    ]
    return {
        "from": begin,
        "to": end,
        "begin": whole[0],
        "end": whole[1],
        "names": timeline["names"],
        "lanes": shown,
    }


def _lanes_of(
    rank: str, spans: list[list[Any]], begin: float, end: float, pixel_us: float
) -> list[dict[str, Any]]:
    """One row per depth of the rank's busiest thread."""
    time_of: dict[int, float] = {}
    for _, duration, lane, depth, _ in spans:
        if depth == 0:
            time_of[lane] = time_of.get(lane, 0.0) + duration
    busiest = max(time_of, key=lambda lane: time_of[lane], default=None)
    rows: list[list[list[Any]]] = [[] for _ in range(DEPTHS)]
    for start, duration, lane, depth, name in spans:
        inside = start < end and start + duration > begin
        if lane == busiest and depth < DEPTHS and inside:
            _thin(rows[depth], start, duration, name, pixel_us)
    return [
        {"label": rank if depth == 0 else f"depth {depth}", "rows": row}
        for depth, row in enumerate(rows)
        if row or depth == 0
    ]


def _thin(row: list[list[Any]], start: float, duration: float, name: int, pixel_us: float) -> None:
    """Spans that share a pixel with the one before are drawn as one."""
    if row and start + duration - row[-1][0] < pixel_us:
        row[-1][1] = max(row[-1][1], start + duration - row[-1][0])
        row[-1][3] += 1
    else:
        row.append([start, duration, name, 1])

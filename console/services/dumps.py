"""The library of dumps: rows, their records, comparisons and views made by programs of the engine.

Path: effects.py writes rows here as jobs begin and end; api/recordings.py reads them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from console.models import Dump, Job
from console.services import recordings
from console.services.programs import run_program
from console.services.recording_actions import DumpTensors

State = Dump.State
RECORDS = re.compile(r"-(dp\d+-tp\d+)\.records\.json")
SHOWN_RECORDS = 5_000


def begun(action: DumpTensors, job: Job) -> None:
    rids = sorted(action.spec().rids)
    before = job.before
    recordings.begun(
        Dump, action, job,
        rids=rids, epoch=before.get("epoch"), token_step=before.get("token_step"),
    )  # fmt: skip


def ended(action: DumpTensors, job: Job) -> None:
    row = Dump.objects.filter(recording_id=action.recording_id).first()
    if row is None:
        return
    if recordings.note_ended(row, job, State.READY):
        row.tensors = sum(said.get("tensors", 0) for said in row.ranks.values())
        row.form = next((said["form"] for said in row.ranks.values() if said.get("form")), "")
        row.bytes = sum(path.stat().st_size for path in recordings.files_of(row))
    if row.pk is not None:
        row.save()


# ---------------------------------------------------------------- reading


def page(*, offset: int, size: int, state: str, words: str, pinned: bool = False) -> dict[str, Any]:
    rows = Dump.objects.all().matching(
        state=state, words=words, pinned=pinned, also=("rids", "form")
    )
    return recordings.page(rows, as_json, name="dumps", offset=offset, size=size)


def as_json(row: Dump) -> dict[str, Any]:
    return {
        "id": row.recording_id,
        "created_at": row.created_at.timestamp(),
        "state": row.state,
        "message": row.message,
        "rids": row.rids,
        "tensors": row.tensors,
        "bytes": row.bytes,
        "epoch": row.epoch,
        "token_step": row.token_step,
        "form": row.form,
        "missing": row.missing,
        "pinned": row.pinned,
        "expired": recordings.expired(row),
        "note": row.note,
        "actor": row.actor,
    }


def state_of(row: Dump) -> dict[str, Any]:
    """SGLang-like answer to ``GET /lazy_dump_tensors/ID``."""
    return {
        "dump_id": row.recording_id,
        "state": row.state,
        "files": [path.name for path in recordings.files_of(row)],
        "missing": row.missing,
        "error": row.message if row.state in (State.FAILED, State.PARTIAL) else "",
        "ranks": row.ranks,
    }


def as_detail(row: Dump) -> dict[str, Any]:
    """The records of all ranks in execution order, as far as a page can show them."""
    points = [
        _point(row, rank, record) for rank, records in _records(row).items() for record in records
    ]
    return {
        "dump": as_json(row),
        "points": points[:SHOWN_RECORDS],
        "left_out": max(0, len(points) - SHOWN_RECORDS),
    }


def _records(row: Dump) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for path in recordings.files_of(row):
        match = RECORDS.fullmatch(path.name[len(row.recording_id) :])
        if match:
            found[match[1]] = msgspec.json.decode(path.read_bytes())["records"]
    return found


def _point(row: Dump, rank: str, record: dict[str, Any]) -> dict[str, Any]:
    """As ``dump-detail.js`` shows a record."""
    told = record["statistics"]
    low, high = told["min"], told["max"]
    histogram = None
    if low is not None and high is not None and sum(told["histogram"]):
        histogram = {"low": low, "high": high, "counts": told["histogram"]}
    key = f"{rank}:{record['key']}"
    return {
        "path": record["name"], "kind": record["kind"], "rank": rank, "step": record["step"],
        "rid": record["rid"], "start": record["start"], "stop": record["stop"],
        "epoch": record["epoch"], "hash": told["sha256"], "histogram": histogram, "key": key,
        **{name: told[name] for name in ("shape", "dtype", "min", "max", "mean", "std", "l2",
                                         "nan", "inf")},
        "has_data": bool(record.get("file")),
        "url": f"/api/dumps/{row.recording_id}/files/{record.get('file', '')}",
    }  # fmt: skip


# ---------------------------------------------------------------- programs


async def compare(a: Dump, b: Dump) -> dict[str, Any]:
    """As ``dump-detail.js`` shows a comparison, in A's execution order."""
    found = await run_program("engine.dumps.compare", _place(a), _place(b), good=(0, 1))
    first = found["first_divergence"]
    points = [_pair(pair) for pair in found["pairs"]]
    points += [_only(name, "a") for name in found["only_in_a"]]
    points += [_only(name, "b") for name in found["only_in_b"]]
    index = None
    if first is not None:
        index = next(at for at, pair in enumerate(found["pairs"]) if pair == first)
    return {
        "a": as_json(a), "b": as_json(b), "label": found["label"], "first": index,
        "points": points[:SHOWN_RECORDS], "problems": found["problems"],
    }  # fmt: skip


def _pair(pair: dict[str, Any]) -> dict[str, Any]:
    return {
        "path": pair["name"],
        "kind": pair["kind"],
        "rank": "all",
        "step": pair["step"],
        "shape": [pair["stop"] - pair["start"]] if pair["rid"] else [],
        "max_abs": pair["max_abs"],
        "max_rel": pair["max_rel"],
        "cosine": pair["cosine"],
        "equal": pair["equal"],
        "diverges": pair["diverges"],
        "note": pair["note"],
        "only_in": "",
    }


def _only(name: str, side: str) -> dict[str, Any]:
    path, _, kind = name.partition(" ")
    return {
        "path": path, "kind": kind, "rank": "", "step": 0, "shape": [], "max_abs": None,
        "max_rel": None, "cosine": None, "equal": False, "diverges": False, "note": "",
        "only_in": side,
    }  # fmt: skip


async def view(row: Dump, key: str) -> dict[str, Any]:
    """A heat map and some values of one tensor; ``key`` is ``RANK:KEY``."""
    return await run_program("engine.dumps.view", _place(row), key)


def _place(row: Dump) -> str:
    return str(Path(row.directory) / row.recording_id)

"""Merge of profiles, beside SGLang's: the rows of engine/profiling/bench.py in this table's form.

Path: __main__.py -> here -> engine.profiling.bench.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec

from engine.bench.recipes import SGLANG, NotMade, interpreter
from engine.bench.table import Row
from engine.profiling.bench import PEER_FILE, PEER_NAME, bench_merge


def merge_rows(peers: Path, work: Path, rounds: int, missing: dict[str, str]) -> list[Row]:
    """Blocks for minutes: SGLang's merger takes about 20 s a round."""
    peer = None
    try:
        peer = _merger_of(interpreter(peers, SGLANG))
    except NotMade as reason:
        missing[PEER_NAME] = str(reason)
    directory = work / "merge"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    try:
        rows = msgspec.convert(bench_merge(directory, peer=peer, rounds=rounds), list[Row])
    finally:
        shutil.rmtree(directory)
    for row in rows:
        if row.unit == "MB":
            row.ratio = None  # its target is a bound, not a ratio
        row.peers = row.peers or {PEER_NAME: None}
    return rows


def _merger_of(python: Path) -> Path:
    """One file of the installed wheel; it imports the standard library alone."""
    return next((python.parent.parent / "lib").glob(f"python3.*/site-packages/{PEER_FILE}"))

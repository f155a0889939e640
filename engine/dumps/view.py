"""A look at one dumped tensor: a heat map that fits a page, and some of its values.

Path: the Dumps page runs ``python -m engine.dumps.view A KEY`` -> here -> JSON. ``A`` is ``DIR/ID``
or a directory with one dump; ``KEY`` is a rank and a record's key: ``dp0-tp0:17:lm_head:logits``.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.dumps.store import Dump, Record, StoreError, TensorStore, find_dump
from engine.errors import NotFound, QuarterdeckError

MAP_CELLS = 64  # along each side, at most
VALUES = 256


class View(msgspec.Struct, frozen=True, kw_only=True):
    """``heat[i][j]`` is the mean of a block of ``block`` rows and columns; None if none is finite.

    The tensor is folded to two dimensions: all but the last, and the last.
    """

    record: Record
    folded: tuple[int, int]
    block: tuple[int, int]
    heat: list[list[float | None]]
    values: list[float | None]


def view(dump: Dump, rank: str, key: str) -> View:
    """NotFound if there is no such record, StoreError if its bytes were not kept."""
    record = _find(dump, rank, key)
    values = TensorStore(dump.directory).read(record).astype(np.float64)
    width = values.shape[-1] if values.ndim else 1
    folded = values.reshape(-1, max(1, width))
    block = (_block(folded.shape[0]), _block(folded.shape[1]))
    return View(
        record=record,
        folded=(folded.shape[0], folded.shape[1]),
        block=block,
        heat=[[_json(cell) for cell in row] for row in heat_map(folded, block).tolist()],
        values=[_json(value) for value in values.ravel()[:VALUES].tolist()],
    )


def heat_map(folded: npt.NDArray[np.float64], block: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Means of blocks over the values that are finite; the last block of a side may be smaller."""
    known = np.isfinite(folded)
    sums, counts = np.where(known, folded, 0.0), known.astype(np.float64)
    for axis, size in enumerate(block):
        starts = np.arange(0, folded.shape[axis], size)
        sums = np.add.reduceat(sums, starts, axis=axis)
        counts = np.add.reduceat(counts, starts, axis=axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1.0), math.nan)


def _find(dump: Dump, rank: str, key: str) -> Record:
    for manifest in dump.manifests:
        if manifest.rank.name == rank:
            for record in manifest.records:
                if record.key == key:
                    return record
    raise NotFound(f"dump {dump.dump_id} has no tensor {key} of {rank}")


def _block(length: int) -> int:
    return max(1, -(-length // MAP_CELLS))


def _json(value: float) -> float | None:
    return value if math.isfinite(value) else None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.dumps.view")
    parser.add_argument("dump", type=Path)
    parser.add_argument("key", help="RANK:KEY")
    options = parser.parse_args()
    rank, _, key = options.key.partition(":")
    try:
        found: Any = view(find_dump(options.dump), rank, key)
    except (QuarterdeckError, StoreError, OSError) as error:
        print(f"no view: {error}", file=sys.stderr)
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(found) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

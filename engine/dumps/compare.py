"""Two dumps side by side: how far each tensor is apart, and where they part first.

Path: two dumps on disk -> here (a job of its own) -> the Dumps page, or by hand:

    python -m engine.dumps.compare A B [--tolerance 0.01]

``A`` and ``B`` are ``DIR/ID``, or a directory with one dump. Exit code 0: equal within the
tolerance, 1: they diverge, 2: not compared. Like is compared with like, whatever made it: slices of
tensor parallel ranks are joined, rows are matched by request and context position (so chunks and
batches may differ), types are widened. Points are taken in the execution order of A.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.dumps.store import Dump, Record, StoreError, TensorStore, find_dump
from engine.errors import QuarterdeckError

# Allowed ||a - b|| / max(||a||, ||b||), by the coarser type: about four roundings of it (2**-8 for
# bf16, 2**-11 for fp16); fp32 also sums in another order, which was seen to reach 1e-5.
TOLERANCES = {"BF16": 1.6e-2, "F16": 2e-3, "F32": 1e-4, "F64": 1e-10}
COARSEST_FIRST = ("BF16", "F16", "F32", "F64")

Values = npt.NDArray[np.float64]


class PairRow(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of A against the same of B. ``note`` says why numbers are missing, if they are."""

    name: str
    kind: str
    rid: str
    step: int  # of A
    start: int
    stop: int
    dtypes: tuple[str, str]
    epochs: tuple[int, int]
    equal: bool = False  # bit for bit
    max_abs: float | None = None
    max_rel: float | None = None
    relative_l2: float | None = None
    cosine: float | None = None
    tolerance: float = 0.0
    diverges: bool = False
    note: str = ""


class Comparison(msgspec.Struct, kw_only=True):
    """``pairs`` in A's execution order; ``label`` is the sentence to show."""

    a: str
    b: str
    forms: tuple[str, str]
    label: str
    first_divergence: PairRow | None
    pairs: list[PairRow]
    only_in_a: list[str]
    only_in_b: list[str]
    rids: dict[str, str]  # of A -> of B
    problems: list[str]


@dataclass(kw_only=True)
class Tensor:
    """One tensor of a dump, of whichever ranks hold a part of it."""

    record: Record  # of the first of these ranks
    parts: list[Record] = field(default_factory=list)
    whole: int = 1  # ranks that should hold a part

    @property
    def point(self) -> tuple[str, str]:
        return (self.record.name, self.record.kind)

    @property
    def replicas_differ(self) -> bool:
        """Whether ranks hold different bytes of something that is not sliced."""
        digests = {part.statistics.sha256 for part in self.parts}
        return self.record.shard_dim is None and len(digests) > 1


class Side:
    """One dump, ready to be read tensor by tensor."""

    def __init__(self, dump: Dump) -> None:
        self.dump = dump
        self.store = TensorStore(dump.directory)
        self.tensors = list(_join_ranks(dump))
        self.rids = list(dict.fromkeys(t.record.rid for t in self.tensors if t.record.rid))
        self.points = list(dict.fromkeys(tensor.point for tensor in self.tensors))

    def read(self, tensor: Tensor) -> npt.NDArray[Any]:
        """All of it, slices joined. StoreError if a part is gone."""
        dim = tensor.record.shard_dim
        if dim is None:
            return self.store.read(tensor.record)
        if len(tensor.parts) != tensor.whole:
            raise StoreError(f"{len(tensor.parts)} of {tensor.whole} slices are there")
        return np.concatenate([self.store.read(part) for part in tensor.parts], axis=dim)


def _join_ranks(dump: Dump) -> Iterator[Tensor]:
    """Tensors in the execution order of each group's first rank, groups one behind the other."""
    ranks = dump.expected or [manifest.rank for manifest in dump.manifests]
    for dp in dict.fromkeys(rank.dp for rank in ranks):
        size = sum(1 for rank in ranks if rank.dp == dp)
        joined: dict[tuple[Any, ...], Tensor] = {}
        for manifest in dump.manifests:
            visits: Counter[tuple[Any, ...]] = Counter()
            for record in manifest.records if manifest.rank.dp == dp else []:
                place = (record.name, record.kind, record.rid, record.step, record.start)
                visits[place] += 1
                key = (*place, visits[place])
                joined.setdefault(key, Tensor(record=record, whole=size)).parts.append(record)
        yield from joined.values()


def compare(a: Dump, b: Dump, tolerance: float | None = None) -> Comparison:
    """Compares what both dumps hold. ``tolerance`` replaces the ones that go with the types."""
    left, right = Side(a), Side(b)
    rids = match_rids(left.rids, right.rids)
    matcher = Matcher(right, rids)
    pairs = [
        compare_pair(left, right, tensor, other, tolerance)
        for tensor in left.tensors
        for other in matcher.partners(tensor)
    ]
    first = next((pair for pair in pairs if pair.diverges), None)
    return Comparison(
        a=a.dump_id,
        b=b.dump_id,
        forms=(_form(a), _form(b)),
        label=_label(pairs, first),
        first_divergence=first,
        pairs=pairs,
        only_in_a=[" ".join(point) for point in left.points if point not in right.points],
        only_in_b=[" ".join(point) for point in right.points if point not in left.points],
        rids=rids,
        problems=[*_problems(left), *_problems(right)],
    )


def match_rids(a: list[str], b: list[str]) -> dict[str, str]:
    """Requests by name where both dumps know it, the rest in order of appearance."""
    same = {rid: rid for rid in a if rid in b}
    rest_a = [rid for rid in a if rid not in same]
    rest_b = [rid for rid in b if rid not in same]
    return same | dict(zip(rest_a, rest_b, strict=False))


class Matcher:
    """Finds the tensors of B that hold the same rows as one of A.

    A row that was computed twice (its request was retracted) is matched visit by visit.
    """

    def __init__(self, side: Side, rids: dict[str, str]) -> None:
        self._rids = rids
        self._by_point: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        self._by_rows: dict[tuple[tuple[str, ...], int, int], deque[Tensor]] = defaultdict(deque)
        for tensor in side.tensors:
            place = (*tensor.point, tensor.record.rid)
            self._by_point[place].append(tensor)
            self._by_rows[place, tensor.record.start, tensor.record.stop].append(tensor)

    def partners(self, tensor: Tensor) -> list[Tensor]:
        """One of equal rows if there is one, else all that overlap."""
        record = tensor.record
        rid = self._rids.get(record.rid, "") if record.rid else ""
        if record.rid and not rid:
            return []
        place = (*tensor.point, rid)
        if visits := self._by_rows.get((place, record.start, record.stop)):
            return [visits.popleft()]
        near = self._by_point.get(place, [])
        return [t for t in near if t.record.start < record.stop and record.start < t.record.stop]


def compare_pair(left: Side, right: Side, a: Tensor, b: Tensor, tolerance: float | None) -> PairRow:
    """The rows that both tensors hold."""
    start = max(a.record.start, b.record.start)
    stop = min(a.record.stop, b.record.stop)
    types = (a.record.statistics.dtype, b.record.statistics.dtype)
    allowed = tolerance_for(types) if tolerance is None else tolerance
    row = PairRow(
        name=a.record.name,
        kind=a.record.kind,
        rid=a.record.rid,
        step=a.record.step,
        start=start,
        stop=stop,
        dtypes=types,
        epochs=(a.record.epoch, b.record.epoch),
        tolerance=allowed,
    )
    if _same_bytes(a, b):
        return msgspec.structs.replace(
            row, equal=True, max_abs=0.0, max_rel=0.0, relative_l2=0.0, cosine=1.0
        )
    try:
        x = _rows_of(left.read(a), a.record, start, stop)
        y = _rows_of(right.read(b), b.record, start, stop)
    except StoreError as error:
        return msgspec.structs.replace(row, note=str(error))
    if x.shape != y.shape:
        note = f"shapes differ: {list(x.shape)} and {list(y.shape)}"
        return msgspec.structs.replace(row, diverges=True, note=note)
    return _measure(row, x.astype(np.float64), y.astype(np.float64))


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Known from the digests alone: nothing needs to be read, or even to have been kept."""
    if a.record.shard_dim is None and b.record.shard_dim is None:
        return a.record.statistics == b.record.statistics
    whole = len(a.parts) == a.whole == b.whole
    return whole and [p.statistics for p in a.parts] == [p.statistics for p in b.parts]


def _rows_of(values: npt.NDArray[Any], record: Record, start: int, stop: int) -> npt.NDArray[Any]:
    if record.rid == "":
        return values
    return values[start - record.start : stop - record.start]


def _measure(row: PairRow, x: Values, y: Values) -> PairRow:
    unlike = ~((x == y) | (np.isnan(x) & np.isnan(y)))  # equal infinities are equal
    usable = np.isfinite(x) & np.isfinite(y)
    odd = int((unlike & ~usable).sum())
    x, y = x[usable], y[usable]
    apart, size = np.abs(x - y), np.maximum(np.abs(x), np.abs(y))
    norms = float(np.linalg.norm(x)), float(np.linalg.norm(y))
    far = float(np.linalg.norm(apart))
    relative = far / max(norms) if max(norms) > 0 else 0.0
    scale = norms[0] * norms[1]
    note = f"{odd} values are NaN or infinite on one side only" if odd else ""
    return msgspec.structs.replace(
        row,
        equal=not unlike.any() and row.dtypes[0] == row.dtypes[1],
        max_abs=float(apart.max(initial=0.0)),
        max_rel=float((apart / np.where(size > 0, size, 1.0)).max(initial=0.0)),
        relative_l2=relative,
        cosine=float(x.ravel() @ y.ravel()) / scale if scale > 0 else None,
        diverges=odd > 0 or relative > row.tolerance,
        note=note,
    )


def tolerance_for(types: tuple[str, str]) -> float:
    """That of the coarser type; whole numbers and truth values must be equal."""
    coarsest = next((name for name in COARSEST_FIRST if name in types), None)
    return TOLERANCES[coarsest] if coarsest else 0.0


def _form(dump: Dump) -> str:
    return ", ".join(dict.fromkeys(manifest.form for manifest in dump.manifests))


def _problems(side: Side) -> Iterator[str]:
    dump = side.dump
    yield from dump.problems
    if dump.missing:
        yield f"{dump.dump_id} lacks {' '.join(dump.missing)}"
    for manifest in dump.manifests:
        if manifest.error:
            yield f"{dump.dump_id} {manifest.rank.name}: {manifest.error}"
        if not manifest.complete:
            yield f"{dump.dump_id} {manifest.rank.name} is not complete"
    if unlike := next((tensor for tensor in side.tensors if tensor.replicas_differ), None):
        where = f"{unlike.record.name} {unlike.record.kind} in step {unlike.record.step}"
        yield f"{dump.dump_id}: ranks that should hold the same differ first at {where}"


def _label(pairs: list[PairRow], first: PairRow | None) -> str:
    compared = sum(1 for pair in pairs if pair.relative_l2 is not None)
    if first is None:
        return f"no divergence in {compared} tensors" if compared else "nothing in common"
    far = sum(1 for pair in pairs if pair.diverges)
    why = first.note
    if first.relative_l2 is not None and not why:
        why = f"relative L2 {first.relative_l2:.3g} > {first.tolerance:.3g}"
    where = f"{first.name} {first.kind}"
    if first.rid:
        where += f" of {first.rid} at position {first.start}"
    return f"first divergence at {where}: {why} ({far} of {compared} tensors diverge)"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m engine.dumps.compare")
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--tolerance", type=float, help="of the relative L2 distance, all types")
    options = parser.parse_args()
    try:
        found = compare(find_dump(options.a), find_dump(options.b), options.tolerance)
    except (QuarterdeckError, OSError, msgspec.DecodeError) as error:
        print(f"not compared: {error}", file=sys.stderr)
        return 2
    print(msgspec.json.format(msgspec.json.encode(found)).decode())
    return 1 if found.first_divergence else 0


if __name__ == "__main__":
    sys.exit(main())

"""Dumped tensors on disk and what is known of each: records, manifests, safetensors files.

Path: capture.py on every rank -> here -> compare.py, view.py and the Dumps page.

Files of the dump ``ID`` (several dumps may share a directory):

* ``ID.dump.json``            the ranks that were asked (``DumpFile``)
* ``ID-dp0-tp1.records.json`` what one rank saw, in execution order (``DumpManifest``)
* ``ID-dp0-tp1-000.safetensors``  tensors of that rank, as many as were kept

The safetensors format (an 8 byte length, a JSON header, the bytes) is read and written here without
its library: that builds all bytes in memory first, under the interpreter lock of a serving rank,
and its numpy reader knows no bfloat16. Reading maps the file, so a comparison holds one tensor.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.artifacts import Rank, check_id, confined, write_atomically
from engine.dumps.points import Kind
from engine.errors import NotFound

HISTOGRAM_BINS = 64
MAX_HEADER_BYTES = 64 << 20
ALIGNMENT = 8

_MANIFEST = re.compile(r"-(dp\d+-tp\d+(?:-pp\d+)?(?:-ep\d+)?)\.records\.json")

# safetensors' names; bfloat16 has no numpy type and is widened from its 16 bits
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}


class StoreError(Exception):
    """A file of a dump that is not what its manifest says."""


class Statistics(msgspec.Struct, frozen=True, kw_only=True):
    """Of one tensor, over its finite values, in fp32 or better. None: there is no finite value.

    ``histogram`` has ``HISTOGRAM_BINS`` equal bins from ``min`` to ``max``, both inside.
    """

    shape: list[int]
    dtype: str
    count: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    l2: float
    nan: int
    inf: int
    histogram: list[int]
    sha256: str  # of the bytes


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One tap: rows of one request (``rid`` "" for weights) at one point in one step.

    Row 0 of the tensor belongs to context position ``start``, and ``stop`` is behind the last.
    ``file`` and ``key`` say where the bytes are; "" if they were not kept.
    """

    name: str
    kind: Kind
    rid: str
    step: int
    epoch: int
    start: int
    stop: int
    shard_dim: int | None
    statistics: Statistics
    key: str
    file: str = ""


class DumpManifest(msgspec.Struct, kw_only=True):
    """What one rank saw. ``form`` names the numeric form that ran, e.g. ``hf eager bf16``."""

    dump_id: str
    rank: Rank
    form: str
    complete: bool = False
    reason: str = ""
    error: str = ""
    evicted: int = 0  # tensors that gave way to newer ones
    records: list[Record] = []


class DumpFile(msgspec.Struct, frozen=True, kw_only=True):
    """Written when a dump starts: which ranks must report."""

    dump_id: str
    ranks: list[Rank]
    created_at: float = 0.0  # seconds since the Unix epoch


@dataclass(kw_only=True)
class Dump:
    """A dump as it lies on disk; ``expected`` is None if nobody wrote it down."""

    directory: Path
    dump_id: str
    expected: list[Rank] | None
    manifests: list[DumpManifest]
    problems: list[str] = field(default_factory=list)

    @property
    def missing(self) -> list[str]:
        found = {manifest.rank.name for manifest in self.manifests}
        return [rank.name for rank in self.expected or [] if rank.name not in found]

    @property
    def state(self) -> str:
        """``capturing`` until every expected rank is complete; ``failed`` if one cannot write."""
        if any(manifest.error for manifest in self.manifests):
            return "failed"
        done = self.manifests and all(manifest.complete for manifest in self.manifests)
        return "ready" if done and not self.missing else "capturing"

    @property
    def files(self) -> list[str]:
        return sorted({r.file for m in self.manifests for r in m.records if r.file})


def write_dump(directory: Path, dump: DumpFile) -> Path:
    """Says which ranks are expected; written by whoever starts the dump, before they start."""
    path = directory / f"{check_id(dump.dump_id)}.dump.json"
    write_atomically(path, msgspec.json.encode(dump))
    return path


def write_manifest(directory: Path, manifest: DumpManifest) -> Path:
    path = directory / f"{manifest.dump_id}-{manifest.rank.name}.records.json"
    write_atomically(path, msgspec.json.encode(manifest))
    return path


def read_dump(directory: Path, dump_id: str) -> Dump:
    """The dump ``dump_id``, and no other whose id begins alike. NotFound if there is none."""
    check_id(dump_id)
    expected = None
    if (path := directory / f"{dump_id}.dump.json").exists():
        expected = msgspec.json.decode(path.read_bytes(), type=DumpFile).ranks
    dump = Dump(directory=directory, dump_id=dump_id, expected=expected, manifests=[])
    for path in sorted(directory.glob("*.records.json")):
        if path.name.startswith(dump_id) and _MANIFEST.fullmatch(path.name[len(dump_id) :]):
            _add_manifest(dump, path)
    if expected is None and not dump.manifests:
        raise NotFound(f"there is no dump {dump_id} in {directory}")
    dump.manifests.sort(key=lambda manifest: manifest.rank.order)
    return dump


def _add_manifest(dump: Dump, path: Path) -> None:
    try:
        dump.manifests.append(msgspec.json.decode(path.read_bytes(), type=DumpManifest))
    except msgspec.DecodeError as error:
        dump.problems.append(f"{path.name} is not a manifest: {error}")


def find_dump(path: Path) -> Dump:
    """``path`` is ``DIR/ID``, or a directory with one dump in it; NotFound names what is there."""
    if not path.is_dir():
        return read_dump(path.parent, path.name)
    ids = {
        found.name[: -len(match[0])]
        for found in path.glob("*.records.json")
        if (match := _MANIFEST.search(found.name))
    }
    if len(ids) != 1:
        names = " ".join(sorted(ids))
        raise NotFound(f"{path.name} holds {len(ids)} dumps, name one: {names}")
    return read_dump(path, ids.pop())


def write_tensors(path: Path, tensors: Mapping[str, tuple[str, list[int], memoryview]]) -> None:
    """A safetensors file of ``key -> (dtype, shape, bytes)``, whole or not at all; OSError."""
    header, at = {}, 0
    for key, (dtype, shape, data) in tensors.items():
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + data.nbytes]}
        at += data.nbytes
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % ALIGNMENT)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", delete=False) as out:
        try:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, _, data in tensors.values():
                out.write(data)
            out.flush()
            os.fsync(out.fileno())
            os.replace(out.name, path)
        except BaseException:
            os.unlink(out.name)
            raise


class TensorFile:
    """A safetensors file, mapped. StoreError if it is not one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with path.open("rb") as source:
                length = int.from_bytes(source.read(8), "little")
                if not 2 <= length <= min(MAX_HEADER_BYTES, size):
                    raise StoreError(f"{path.name} has no safetensors header")
                self._header = msgspec.json.decode(source.read(length), type=dict[str, Any])
        except (OSError, msgspec.DecodeError) as error:
            raise StoreError(f"{path.name} cannot be read: {error}") from error
        self._data = np.memmap(path, dtype=np.uint8, mode="r", offset=8 + length)

    def read(self, record: Record) -> npt.NDArray[Any]:
        """The record's tensor in its own type (bfloat16 as float32), its bytes checked."""
        entry = self._header.get(record.key)
        if entry is None:
            raise StoreError(f"{self._path.name} has no tensor {record.key!r}")
        first, last = entry["data_offsets"]
        data = self._data[first:last]
        if hashlib.sha256(data.data).hexdigest() != record.statistics.sha256:
            raise StoreError(f"{record.key!r} in {self._path.name} is damaged: another sha256")
        return to_numpy(data, entry["dtype"], entry["shape"])


def to_numpy(data: npt.NDArray[np.uint8], dtype: str, shape: Iterable[int]) -> npt.NDArray[Any]:
    """Bytes of a safetensors tensor as an array; bfloat16 becomes float32 without loss."""
    if dtype not in NUMPY_TYPES:
        raise StoreError(f"tensors of type {dtype} cannot be compared")
    values = data.view(NUMPY_TYPES[dtype])
    if dtype == "BF16":
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return values.reshape(tuple(shape))


class TensorStore:
    """Tensors of all ranks of a dump, opened as they are needed."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, TensorFile] = {}

    def read(self, record: Record) -> npt.NDArray[Any]:
        """StoreError if the record's bytes were not kept or are damaged."""
        if not record.file:
            raise StoreError(f"the bytes of {record.key!r} were not kept")
        if record.file not in self._open:
            self._open[record.file] = TensorFile(confined(self._directory, record.file))
        return self._open[record.file].read(record)

"""Safetensors on disk: names, shapes, dtypes, bytes and checksums of weights. No torch.

Path: update.py stages what is read here; router/ledger.py asks whether a path can still be loaded;
``python -m engine.weights.checkpoint PATH`` prints what a checkpoint is, as JSON.

Files are read, never mapped: a file that a trainer rewrites while it is mapped ends the reader with
SIGBUS. The format (8-byte length, JSON header, bytes) is that of huggingface/safetensors; pickled
formats are refused.

The checksum of a set of tensors is the sha256 over one line per tensor, in the order of their
names: ``NAME DTYPE SHAPE DIGEST\\n``, where DTYPE is the stored one in safetensors' spelling
(``BF16``), SHAPE its sizes joined with ``x`` and DIGEST the sha256 of its bytes in hex. So it does
not depend on files, buckets or their order.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import struct
import sys
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.errors import QuarterdeckError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LOAD_FORMATS = ("auto", "safetensors")
MAX_HEADER_BYTES = 100 * 2**20
SPARE_BYTES = 64 * 2**20  # left free on the disk that a spool is written to
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2,
    "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip


class WeightError(QuarterdeckError):
    """Weights that cannot be taken; the sentence names file or tensor and what is wrong."""

    status_code = 400
    err_type = "bad_weights"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor by name; ``dtype`` in safetensors' spelling."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """A tensor with its bytes: little endian, row by row, writable, owned by who holds this."""

    spec: TensorSpec
    data: memoryview
    tensor: Any = None  # the torch tensor that these bytes are (a copy) of, where there is one

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def checksum_of(digests: Mapping[TensorSpec, str]) -> str:
    """The checksum of a set of weights, as the module's docstring defines it."""
    whole = hashlib.sha256()
    for spec in sorted(digests, key=lambda spec: spec.name):
        sizes = "x".join(map(str, spec.shape))
        whole.update(f"{spec.name} {spec.dtype} {sizes} {digests[spec]}\n".encode())
    return whole.hexdigest()


# --------------------------------------------------------------------------- reading


class TensorFile:
    """One safetensors file. Raises WeightError for anything that is none, or is cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with _open(path) as file:
            size = os.fstat(file.fileno()).st_size
            self._base, header = _read_header(path, file, size)
        self._spans: dict[str, tuple[int, int]] = {}
        self.specs: dict[str, TensorSpec] = {}
        end = 0
        entries = [_entry(path, name, entry) for name, entry in header.items()]
        for spec, span in sorted(entries, key=lambda entry: entry[1]):
            if span[0] != end or span[1] - span[0] != spec.nbytes:
                raise WeightError(f"{path}: the place of tensor {spec.name} does not fit its shape")
            end = span[1]
            self.specs[spec.name], self._spans[spec.name] = spec, span
        if self._base + end != size:
            raise WeightError(
                f"{path} has {size} bytes, its header promises {self._base + end}: it is cut off "
                "or still being written"
            )

    def tensors(self) -> Generator[NamedTensor]:
        """All tensors in the order of the file, one in memory at a time."""
        with _open(self.path) as file:
            for name, spec in self.specs.items():
                first, last = self._spans[name]
                data = bytearray(last - first)
                file.seek(self._base + first)
                if file.readinto(data) != len(data):
                    raise WeightError(f"{self.path} was cut off while it was read (at {name})")
                yield NamedTensor(spec, memoryview(data))


class Checkpoint:
    """A safetensors file, or a directory of them. ``specs`` has the order of ``tensors()``."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._files: list[tuple[TensorFile, frozenset[str]]] = []
        self.specs: dict[str, TensorSpec] = {}
        for file, wanted in _files(self.path):
            names = frozenset(file.specs) if wanted is None else wanted
            for name in names - file.specs.keys():
                raise WeightError(f"{file.path} has no tensor {name}, which {INDEX} names")
            for name in (name for name in file.specs if name in names):
                if name in self.specs:
                    raise WeightError(f"{self.path}: tensor {name} is in two files")
                self.specs[name] = file.specs[name]
            self._files.append((file, names))
        if not self.specs:
            raise WeightError(f"{self.path} holds no tensors")

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.specs.values())

    def tensors(self) -> Generator[NamedTensor]:
        for file, names in self._files:
            for tensor in file.tensors():
                if tensor.spec.name in names:
                    yield tensor


def _files(path: Path) -> Iterator[tuple[TensorFile, frozenset[str] | None]]:
    """Files with the names wanted from each (None: all)."""
    if not path.exists():
        raise WeightError(f"there are no weights at {path}", err_type="not_found")
    if not path.is_dir():
        yield TensorFile(path), None
    elif (path / INDEX).exists():
        of_file: dict[str, set[str]] = {}
        for tensor, part in _read_index(path / INDEX).items():
            of_file.setdefault(Path(part).name, set()).add(tensor)
        for part, names in sorted(of_file.items()):
            yield TensorFile(path / part), frozenset(names)
    else:
        found = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
        if not found:
            raise WeightError(
                f"{path} holds no *.safetensors file; pickled weights are never read, convert "
                "them with transformers' save_pretrained"
            )
        for file in found:
            yield TensorFile(file), None


def _open(path: Path) -> BufferedReader:
    try:
        if not path.is_file():
            raise WeightError(f"{path} is no regular file")
        return open(path, "rb")  # noqa: SIM115 - the callers close it
    except OSError as error:
        raise WeightError(f"{path} cannot be read: {error.strerror}") from error


def _read_header(path: Path, file: BufferedReader, size: int) -> tuple[int, dict[str, Any]]:
    """Where the bytes begin, and the header without its metadata."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise WeightError(f"{path} is no safetensors file, or is cut off in its header")
    try:
        header = json.loads(file.read(length))
    except ValueError as error:
        raise WeightError(f"{path} has a damaged safetensors header: {error}") from error
    if not isinstance(header, dict):
        raise WeightError(f"{path} has a safetensors header that is no JSON object")
    header.pop("__metadata__", None)
    return 8 + length, header


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorSpec, tuple[int, int]]:
    try:
        shape = tuple(map(int, entry["shape"]))
        first, last = map(int, entry["data_offsets"])
        dtype = str(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise WeightError(f"{path}: the header entry of tensor {name} is damaged") from error
    if dtype not in DTYPE_BYTES:
        raise WeightError(f"{path}: tensor {name} has the unknown dtype {dtype}")
    if min(shape, default=0) < 0:
        raise WeightError(f"{path}: tensor {name} has the impossible shape {shape}")
    return TensorSpec(name, dtype, shape), (first, last)


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightError(f"{path} is damaged: {error}") from error


def problem_with(path: str) -> str:
    """Why the weights at ``path`` cannot be loaded, judged by headers and sizes; "" if they can."""
    try:
        Checkpoint(path)
    except WeightError as error:
        return error.message
    return ""


def effective(paths: Iterable[str]) -> tuple[str, ...]:
    """Those of ``paths`` that still matter when later ones win name by name, in their order."""
    covered: set[str] = set()
    kept: list[str] = []
    for path in reversed(list(paths)):
        names = Checkpoint(path).specs.keys()
        if not names <= covered:
            covered |= names
            kept.append(path)
    return tuple(reversed(kept))


# --------------------------------------------------------------------------- writing


class TensorWriter:
    """Writes one safetensors file tensor by tensor, in the order of ``specs``.

    A context: the file is there after a normal exit, and no trace of it after an error. Raises
    WeightError when the disk has no room for it, before the first byte is written.
    """

    def __init__(self, path: Path, specs: Iterable[TensorSpec]) -> None:
        self._path = path
        self._draft = path.with_name(path.name + ".part")
        self._left = list(specs)[::-1]
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        header = _header(reversed(self._left))
        wanted = len(header) + sum(spec.nbytes for spec in self._left)
        free = shutil.disk_usage(path.parent).free
        if free < wanted + SPARE_BYTES:
            raise WeightError(
                f"{path.parent} has {free} bytes free, these weights need {wanted}",
                status_code=507,
                err_type="no_space",
            )
        self._file = open(self._draft, "wb")  # noqa: SIM115 - closed by __exit__
        self._file.write(header)

    def write(self, tensor: NamedTensor) -> None:
        if not self._left or self._left.pop() != tensor.spec:
            raise ValueError(f"{tensor.spec} is not the next tensor of {self._path}")
        self._file.write(tensor.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        with self._file:
            if kind is not None or self._left:
                self._draft.unlink()
                return
            self._file.flush()
            os.fsync(self._file.fileno())
        os.replace(self._draft, self._path)


def _header(specs: Iterable[TensorSpec]) -> bytes:
    entries: dict[str, Any] = {}
    end = 0
    for spec in specs:
        begin, end = end, end + spec.nbytes
        entries[spec.name] = {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


# --------------------------------------------------------------------------- by itself


def describe(path: str) -> dict[str, Any]:
    """Reads it all: what the console shows and registers."""
    checkpoint = Checkpoint(path)
    digests = {tensor.spec: tensor.digest for tensor in checkpoint.tensors()}
    return {
        "path": str(checkpoint.path),
        "tensors": len(digests),
        "bytes": checkpoint.nbytes,
        "dtypes": sorted({spec.dtype for spec in digests}),
        "checksum": checksum_of(digests),
    }


def main() -> int:
    try:
        print(json.dumps(describe(sys.argv[1])))
    except WeightError as error:
        print(json.dumps({"error": error.message}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Stages new weights on one rank and swaps them in: prepare, seal, commit or drop. No torch.

Path: scheduler/control.py -> here -> model/weights.py (the backend's staging and live storages).

Buckets accumulate under a staging id until they are committed together or dropped. ``prepare`` and
``seal`` run on a thread beside serving; ``commit`` runs on the step thread and only copies. A drop
from the step thread stops a prepare at its next tensor. Whatever fails leaves the live weights as
they were.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from engine.messages import PrepareWeights, WeightSource
from engine.model.weights import Staging, WeightHolder
from engine.weights.checkpoint import (
    LOAD_FORMATS,
    Checkpoint,
    NamedTensor,
    TensorSpec,
    TensorWriter,
    WeightError,
    checksum_of,
)
from engine.weights.groups import Groups

NAMES_IN_A_SENTENCE = 3
# dtypes as trainers spell them (torch's names) in safetensors' spelling
SPELLED = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "int32": "I32", "int64": "I64",
    "float16": "F16", "half": "F16", "bfloat16": "BF16", "float32": "F32", "float": "F32",
    "float64": "F64", "double": "F64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


@dataclass(slots=True)
class Staged:
    """Everything under one staging id."""

    staging: Staging
    digests: dict[str, tuple[TensorSpec, str]] = field(default_factory=dict)
    nbytes: int = 0
    dropped: bool = False
    sealed: bool = False

    def check_wanted(self) -> None:
        if self.dropped:
            raise WeightError("the update was dropped meanwhile", err_type="dropped")


class Stager:
    """The stagings of one rank."""

    def __init__(self, holder: WeightHolder, groups: Groups, *, spools: bool, dp: int) -> None:
        """``spools``: this rank is tp 0 and may be the one that writes what came over a network."""
        self._holder, self._groups = holder, groups
        self._spools, self._dp = spools, dp
        self._staged: dict[str, Staged] = {}

    def prepare(self, op: PrepareWeights) -> dict[str, Any]:
        """Takes one bucket in. Raises WeightError, and then nothing of this id is left here, and a
        group that the bucket came from is left."""
        began = time.monotonic()
        staged = self._staged.setdefault(op.staging_id, Staged(self._holder.begin()))
        try:
            self._take(staged, op)
        except BaseException:
            self.drop(op.staging_id)
            if op.source.kind == "distributed":  # or the trainer waits for this rank for ever
                self._groups.abandon(op.source.group_name)
            raise
        return {**self._summary(staged), "seconds": round(time.monotonic() - began, 3)}

    def seal(self, staging_id: str) -> dict[str, Any]:
        """No more buckets: what is missing for a commit happens now."""
        staged = self._known(staging_id)
        staged.staging.seal()
        staged.check_wanted()
        staged.sealed = True
        return self._summary(staged)

    def is_sealed(self, staging_id: str) -> bool:
        return staging_id in self._staged and self._staged[staging_id].sealed

    def commit(self, staging_id: str) -> bool:
        """The live storages now hold what was staged; True when that was every parameter."""
        staged = self._staged.pop(staging_id)
        assert staged.sealed, "only sealed weights are committed"
        self._holder.commit(staged.staging)
        return not self._missing(staged.digests)

    def drop(self, staging_id: str) -> None:
        """Idempotent; from any thread."""
        staged = self._staged.pop(staging_id, None)
        if staged is not None:
            staged.dropped = True

    def is_complete(self, staging_id: str) -> bool:
        """Whether every parameter is staged."""
        return not self._missing(self._known(staging_id).digests)

    def stage(self, staging_id: str, paths: Iterable[str]) -> dict[str, Any]:
        """Prepares and seals the weights at ``paths``, later ones winning. Raises WeightError."""
        self.drop(staging_id)
        for path in paths:
            source = WeightSource(kind="disk", path=path)
            self.prepare(PrepareWeights(staging_id=staging_id, source=source))
        return self.seal(staging_id)

    # ------------------------------------------------------------------ taking a bucket

    def _take(self, staged: Staged, op: PrepareWeights) -> None:
        if staged.sealed:
            raise WeightError("these weights are sealed; begin another update")
        specs, tensors = self._open(staged, op.source)
        for spec in specs:
            self._holder.check(spec)
        if op.complete:
            self._check_complete(specs)
        _check_memory(sum(spec.nbytes for spec in specs))
        spool = self._spool(op.source, specs)
        with closing(tensors), spool or nullcontext():
            for tensor in tensors:
                staged.check_wanted()
                staged.digests[tensor.spec.name] = (tensor.spec, tensor.digest)
                staged.nbytes += tensor.spec.nbytes
                if spool is not None:
                    spool.write(tensor)
                staged.staging.add(tensor)
            staged.check_wanted()

    def _open(
        self, staged: Staged, source: WeightSource
    ) -> tuple[list[TensorSpec], Generator[NamedTensor]]:
        """What the source holds, and an iterator that reads or receives it."""
        if source.kind == "distributed":
            specs = _specs_of(source)
            tensors = self._groups.receive(source.group_name, specs, lambda: staged.dropped)
            return specs, tensors
        if source.load_format not in LOAD_FORMATS:
            raise WeightError(
                f"load_format {source.load_format!r} is not supported, use "
                f"{' or '.join(LOAD_FORMATS)}",
                err_type="not_supported",
            )
        checkpoint = Checkpoint(source.path)
        return list(checkpoint.specs.values()), checkpoint.tensors()

    def _spool(self, source: WeightSource, specs: list[TensorSpec]) -> TensorWriter | None:
        if not source.spool_path or not self._spools or source.spool_by != self._dp:
            return None
        return TensorWriter(Path(source.spool_path), specs)

    def _check_complete(self, specs: list[TensorSpec]) -> None:
        missing = self._missing(spec.name for spec in specs)
        if missing:
            raise WeightError(
                f"{len(missing)} of {len(self._holder.required)} parameters are missing "
                f"({_some(missing)}); send parts of a model within a weight session or a pause",
                err_type="partial_update_needs_session",
            )

    # ------------------------------------------------------------------ telling

    def _known(self, staging_id: str) -> Staged:
        staged = self._staged.get(staging_id)
        if staged is None:
            raise WeightError("this rank holds no such weights; it may have restarted")
        return staged

    def _missing(self, names: Iterable[str]) -> list[str]:
        return sorted(self._holder.required.difference(names))

    def _summary(self, staged: Staged) -> dict[str, Any]:
        digests = dict(staged.digests.values())
        return {
            "checksum": checksum_of(digests),
            "tensors": len(digests),
            "bytes": staged.nbytes,
            "missing": len(self._missing(staged.digests)),
        }


def _specs_of(source: WeightSource) -> list[TensorSpec]:
    if not len(source.names) == len(source.dtypes) == len(source.shapes):
        raise WeightError("names, dtypes and shapes must be lists of equal length")
    if not source.names or len(set(source.names)) < len(source.names):
        raise WeightError("names must name at least one parameter, each once")
    specs = []
    for name, dtype, shape in zip(source.names, source.dtypes, source.shapes, strict=True):
        spelled = SPELLED.get(dtype.removeprefix("torch."))
        if spelled is None:
            raise WeightError(f"{name} has the unknown dtype {dtype}", err_type="dtype_mismatch")
        specs.append(TensorSpec(name, spelled, tuple(shape)))
    return specs


def _check_memory(wanted: int) -> None:
    """A rank that runs out of memory is killed; a refusal is better."""
    free = psutil.virtual_memory().available
    if free < wanted:
        raise WeightError(
            f"staging needs {wanted} bytes of memory, {free} are available",
            status_code=507,
            err_type="no_memory",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_IN_A_SENTENCE])
    return shown + (", ..." if len(names) > NAMES_IN_A_SENTENCE else "")

"""Where a checkpoint tensor lies in the storages that a forward reads, and how it gets there.

Path: native_ops.py and eager_decoder.py say where -> native.py loads and weight updates stage and
commit through here. ``stage`` does the work (sharding, rounding, packing) off the step thread;
``commit`` only copies into the storage that exists. One checkpoint tensor may have several targets
(a tied embedding), and several of them may share a storage (query, key and value).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine.model.layout import Source
from engine.model.weights import overwrite


class Target(Protocol):
    """One rank's part of one checkpoint tensor."""

    @property
    def source(self) -> Source: ...

    def stage(self, part: torch.Tensor) -> torch.Tensor:
        """``source.take`` of the tensor, in the form of the storage."""
        ...

    def commit(self, staged: torch.Tensor) -> None: ...

    def read(self, count: int) -> list[float]:
        """The first ``count`` values of the part, as the forward sees them."""
        ...


@dataclass(frozen=True, slots=True)
class TensorTarget:
    """Values in the dtype of ``where``, which has the shape of the part; then ``convert``."""

    source: Source
    where: torch.Tensor
    convert: Callable[[torch.Tensor], torch.Tensor] | None = None

    def stage(self, part: torch.Tensor) -> torch.Tensor:
        rounded = part.to(device=self.where.device, dtype=self.where.dtype)
        return rounded if self.convert is None else self.convert(rounded)

    def commit(self, staged: torch.Tensor) -> None:
        overwrite(self.where, staged)

    def read(self, count: int) -> list[float]:
        values: list[float] = self.where.flatten()[:count].float().tolist()
        return values


@dataclass(frozen=True, slots=True)
class VectorTarget:
    """fp32 values plus ``offset``, padded with zeros to the elements of ``where``."""

    source: Source
    where: torch.Tensor
    offset: float = 0.0

    def stage(self, part: torch.Tensor) -> torch.Tensor:
        missing = self.where.numel() - part.numel()
        return functional.pad(part.float() + self.offset, (0, missing)).view(self.where.shape)

    def commit(self, staged: torch.Tensor) -> None:
        overwrite(self.where, staged)

    def read(self, count: int) -> list[float]:
        values: list[float] = (self.where.flatten()[:count] - self.offset).tolist()
        return values

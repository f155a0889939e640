"""Tensors whose memory can go and come back while every reference to them stays valid.

Path: scheduler/memory.py decides -> torch_runner.py -> here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Storages:
    """The storages behind some tensors, each once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._sizes: dict[int, int] = {}

    def release(self) -> None:
        for key, tensor in self._tensors.items():
            storage = tensor.untyped_storage()
            self._sizes[key] = storage.nbytes()
            storage.resize_(0)

    def restore(self) -> None:
        """Same shapes, zeros."""
        for key, size in self._sizes.items():
            storage = self._tensors[key].untyped_storage()
            storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()

"""Tensors whose memory can go and come back while every pointer to them stays valid.

Path: scheduler/memory.py decides -> torch_runner.py -> here. On CPU the pages are given back to the
system and the addresses stay, since C++ holds them; on CUDA the storages shrink to nothing.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable

import torch

_MADV_DONTNEED = 4
_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Storages:
    """The storages behind some tensors, each once."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
        self._sizes: dict[int, int] = {}

    def release(self) -> None:
        for key, tensor in self._tensors.items():
            storage = tensor.untyped_storage()
            self._sizes[key] = storage.nbytes()
            if tensor.device.type == "cpu":
                _give_back(storage.data_ptr(), storage.nbytes())
            else:
                storage.resize_(0)

    def restore(self) -> None:
        """Same shapes, zeros."""
        for key, size in self._sizes.items():
            storage = self._tensors[key].untyped_storage()
            if storage.nbytes() != size:
                storage.resize_(size)
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).zero_()


def _give_back(address: int, size: int) -> None:
    """The whole pages within; anonymous memory reads as zeros afterwards."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (address + size - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0 and _libc.madvise(first, whole, _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise failed")

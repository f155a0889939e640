"""The C++ library's structures and calls, and matrices packed by it.

Path: native_ops.py -> here -> csrc/api.cpp. The structures mirror ``layer.hpp``, ``attention.hpp``
and ``sample.hpp`` field by field.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_double, c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch

from engine.model.layout import Source
from engine.model.memory import untouched_zeros
from engine.model.weights import overwrite

FLOAT32, BFLOAT16, INT4, INT8 = range(4)
PANEL = 16  # rows of a packed panel
MOST_HEAD_DIM = 256
CACHE_LINE = 64
AREA_BYTES = 64 << 20


class Matrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("padding", c_int32),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("after_attention_norm", c_void_p),
        ("after_mlp_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("cos_sin", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("window", c_int32),
        ("padding", c_int32),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(Layer)),
        ("head", Matrix),
        ("embedding", c_void_p),
        ("final_norm", c_void_p),
        ("layer_count", c_int32),
        ("hidden", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("intermediate", c_int32),
        ("gelu", c_int32),
        ("cache_kind", c_int32),
        ("embedding_kind", c_int32),
        ("epsilon", c_float),
        ("attention_scale", c_float),
        ("attention_cap", c_float),
        ("logit_cap", c_float),
        ("embedding_scale", c_float),
    ]


class RaggedBatch(ctypes.Structure):
    _fields_ = [
        ("token_ids", c_void_p),
        ("positions", c_void_p),
        ("kv_slots", c_void_p),
        ("query_starts", c_void_p),
        ("context_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("tokens", c_int32),
        ("rows", c_int32),
        ("table_width", c_int32),
        ("block_size", c_int32),
    ]


class RowRequest(ctypes.Structure):
    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("forced", c_int32),
        ("describe", c_int32),
        ("point", c_double),
    ]


class RowResult(ctypes.Structure):
    _fields_ = [
        ("token_id", c_int32),
        ("logprob", c_float),
        ("entropy", c_float),
        ("logsumexp", c_float),
    ]


class Library:
    """The C functions; a call that fails raises RuntimeError. The GIL is released in a call."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.qd_last_error.restype = ctypes.c_char_p
        library.qd_panel_bytes.restype = c_int64

    def panel_bytes(self, kind: int, columns: int) -> int:
        return int(self._library.qd_panel_bytes(kind, columns))

    def call(self, name: str, *arguments: Any) -> None:
        """Tensors and ``c_void_p`` are passed as pointers, ints as 32-bit numbers."""
        given = [c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        if getattr(self._library, name)(*given):
            raise RuntimeError(f"{name}: {self._library.qd_last_error().decode()}")


class Memory:
    """Storages that C++ points to: small ones by themselves, matrices in areas of huge pages."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self.kept: list[torch.Tensor] = []

    @property
    def bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.kept)

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` itself, which must be contiguous; it lives as long as this object."""
        assert tensor.is_contiguous()
        self.kept.append(tensor)
        return tensor

    def panels(self, kind: int, count: int, columns: int) -> torch.Tensor:
        """uint8 zeros [count, bytes of a panel], aligned to a cache line."""
        width = self._library.panel_bytes(kind, columns)
        size = count * width
        if self._used + size > len(self._area):
            self._area = untouched_zeros((max(size, AREA_BYTES),), torch.uint8)
            self._used = 0
        taken = self._area[self._used : self._used + size]
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return self.keep(taken).view(count, width)


@dataclass(frozen=True, slots=True)
class PanelTarget:
    """Rows of a matrix in whole panels; ``where`` is uint8 [panels, bytes], any stride."""

    source: Source
    where: torch.Tensor
    kind: int
    library: Library

    def stage(self, part: torch.Tensor) -> torch.Tensor:
        """One thread: others are computing the next step."""
        rows, columns = part.shape
        wide = part.float().contiguous()
        packed = torch.zeros(self.where.shape, dtype=torch.uint8)
        self.library.call("qd_pack", self.kind, wide, rows, columns, packed)
        return packed

    def commit(self, staged: torch.Tensor) -> None:
        overwrite(self.where, staged)

    def read(self, count: int) -> list[float]:
        """Quantised weights as their codes make them."""
        columns = self.source.part_shape[1]
        rows = min(-(-count // columns), self.source.part_shape[0])
        wide = torch.empty(rows, columns)
        packed = self.where[: -(-rows // PANEL)].contiguous()
        self.library.call("qd_unpack", self.kind, packed, rows, columns, wide)
        values: list[float] = wide.flatten()[:count].tolist()
        return values

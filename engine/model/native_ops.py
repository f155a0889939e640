"""The C++ decoder of ``csrc/`` behind ctypes: structures, packing of weights, calls.

Path: native.py -> here -> csrc/api.cpp. The structures mirror ``layer.hpp`` field by field. Every
pointer given to C++ belongs to a tensor that this object keeps; a weight update repacks into the
same storages.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, byref, c_double, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch

from engine.config import EngineConfig
from engine.model.inputs import Batch
from engine.model.kv_cache import KVCache
from engine.model.layout import Layout, Read, Shard, assemble, shape_of
from engine.model.packed_weights import PackedWeights
from engine.model.sampler import DrawRequest, DrawResult
from engine.model.spec import DecoderSpec
from engine.scheduler.ranks import Group

FLOAT32, BFLOAT16, INT4, INT8 = range(4)
PANEL = 16
CACHE_LINE = 64
AREA_BYTES = 64 << 20
_MATRICES = {
    "qkv": ("qkv",),
    "output": ("output",),
    "gate_up": ("gate", "up"),
    "down": ("down",),
}
_NORMS = (
    "input_norm",
    "mlp_norm",
    "after_attention_norm",
    "after_mlp_norm",
    "query_norm",
    "key_norm",
)
_KINDS = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}


class _Matrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("rows", c_int32),
        ("columns", c_int32),
        ("padding", c_int32),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", _Matrix),
        ("output", _Matrix),
        ("gate_up", _Matrix),
        ("down", _Matrix),
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


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(_Layer)),
        ("head", _Matrix),
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


class _Batch(ctypes.Structure):
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


class _DrawRequest(ctypes.Structure):
    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("forced", c_int32),
        ("describe", c_int32),
        ("point", c_double),
    ]


class _DrawResult(ctypes.Structure):
    _fields_ = [
        ("token_id", c_int32),
        ("logprob", c_float),
        ("entropy", c_float),
        ("logsumexp", c_float),
    ]


class Library:
    """The C functions with their types; a call that fails raises RuntimeError."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.qd_last_error.restype = ctypes.c_char_p
        library.qd_panel_bytes.restype = c_int64

    def panel_bytes(self, kind: int, columns: int) -> int:
        return int(self._library.qd_panel_bytes(kind, columns))

    def call(self, name: str, *arguments: Any) -> None:
        """Pointers are ``c_void_p`` or tensors, numbers are ints; the GIL is released."""
        given = [c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
        if getattr(self._library, name)(*given):
            raise RuntimeError(f"{name}: {self._library.qd_last_error().decode()}")


class Packer:
    """Packs matrices into a few large areas on huge pages."""

    def __init__(self, library: Library, threads: int) -> None:
        self._library = library
        self._threads = threads
        self._area = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def _zeros(self, size: int) -> torch.Tensor:
        """``size`` bytes of zeros, aligned to a cache line."""
        if self._used + size > len(self._area):
            self._area = torch.zeros(max(size, AREA_BYTES), dtype=torch.uint8)
            self._library.call("qd_use_huge_pages", self._area, c_int64(self._area.numel()))
            self._used = 0
        taken = self._area[self._used : self._used + size]
        self._used += -(-size // CACHE_LINE) * CACHE_LINE
        return taken

    def matrix(
        self,
        kind: int,
        weights: list[torch.Tensor],
        biases: list[torch.Tensor | None],
    ) -> list[torch.Tensor]:
        """One matrix [rows, columns], or several of one shape whose panels alternate: the packed
        bytes, and the bias if there is one."""
        rows, columns = weights[0].shape
        count, panels = len(weights), -(-rows // PANEL)
        packed = self._zeros(self._library.panel_bytes(kind, columns) * panels * count)
        for first, weight in enumerate(weights):
            wide = weight.float().contiguous()
            self._library.call(
                "qd_pack", self._threads, kind, wide, rows, columns, first, count, packed
            )
        if biases[0] is None:
            return [packed]
        bias = torch.zeros(panels, count, PANEL)
        for first, one in enumerate(biases):
            assert one is not None
            padded = torch.zeros(panels * PANEL).index_copy_(0, torch.arange(rows), one.float())
            bias[:, first] = padded.view(panels, PANEL)
        return [packed, bias]


class CpuDecoder:
    """One rank's decoder in C++; see ``native.Decoder``."""

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: DecoderSpec,
        shard: Shard,
        parts: Layout,
        read: Read,
        *,
        tables: list[torch.Tensor],
        cache: KVCache,
        group: Group | None,
        config: EngineConfig,
        dtype: torch.dtype,
    ) -> None:
        self._library = Library(library)
        self._packer = Packer(self._library, config.rank_threads)
        self._spec = spec
        self._shard = shard
        self._group = group
        self._cache = cache  # its storages are written by C++
        self._dtype = dtype
        self.weight_form: str = config.weights
        self._parts = parts
        self._live = {key: self._pack(self._packer, key, read) for key in self._entries()}
        layers = self._layers(tables)
        model = self._model(layers)
        self._handle = c_void_p()
        self._library.call("qd_create", byref(model), config.rank_threads, byref(self._handle))
        live = [tensor for tensors in self._live.values() for tensor in tensors]
        self.parameter_bytes = sum(tensor.nbytes for tensor in live)
        self.weights = PackedWeights(
            parts,
            {key: self._names(key) for key in self._live},
            self._live,
            pack=lambda key, read: self._pack(Packer(self._library, 1), key, read),
        )

    def hidden(self, batch: Batch) -> torch.Tensor:
        x = torch.empty(batch.tokens, self._spec.hidden)
        described = byref(_describe(batch))
        if self._group is None:
            self._library.call("qd_forward", self._handle, described, x)
            return x
        self._library.call("qd_embed", self._handle, described, x)
        delta = torch.empty_like(x)
        for index in range(len(self._spec.layers)):
            self._library.call("qd_attention", self._handle, described, index, x, delta)
            self._group.all_reduce(delta)
            self._library.call("qd_join", self._handle, batch.tokens, index, 0, x, delta)
            self._library.call("qd_mlp", self._handle, batch.tokens, index, x, delta)
            self._group.all_reduce(delta)
            self._library.call("qd_join", self._handle, batch.tokens, index, 1, x, delta)
        return x

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        self._library.call("qd_final_norm", self._handle, x, len(x), out)
        return out

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(x), self._shard.vocabulary)
        self._library.call("qd_logits", self._handle, x, len(x), out)
        return out

    def draw(self, logits: torch.Tensor, requests: list[DrawRequest]) -> list[DrawResult]:
        """``sampler.Draw`` over fp32 logits [rows, vocab]."""
        count = len(requests)
        asked = (_DrawRequest * count)(*map(_ask, requests))
        drawn = (_DrawResult * count)()
        rows = logits.contiguous()
        self._library.call("qd_sample", self._handle, rows, count, rows.shape[1], asked, drawn)
        return [DrawResult(d.token_id, d.logprob, d.entropy, d.logsumexp) for d in drawn]

    def close(self) -> None:
        """Ends the threads; the decoder cannot be used afterwards."""
        if self._handle:
            self._library.call("qd_destroy", self._handle)
            self._handle = c_void_p()

    def _kind(self, *, head: bool = False) -> int:
        """Int4 models keep their output layer in int8: its errors reach every logit."""
        if self.weight_form == "plain":
            return _KINDS[self._dtype]
        return INT8 if head else INT4

    def _entries(self) -> list[str]:
        """What is packed as one: matrices by their name in C++, norms, the embedding."""
        keys = ["final_norm", "head"]
        if not (self._spec.tied and self._group is None and self.weight_form == "plain"):
            keys.append("embedding")
        for index in range(len(self._spec.layers)):
            keys += [f"layers.{index}.{name}" for name in _MATRICES]
            keys += [key for name in _NORMS if (key := f"layers.{index}.{name}") in self._parts]
        return keys

    def _names(self, key: str) -> tuple[str, ...]:
        """The layout entries that one packed entry is made of."""
        prefix, _, name = key.rpartition(".")
        if name not in _MATRICES:
            return (key,)
        weights = [f"{prefix}.{part}" for part in _MATRICES[name]]
        biases = [f"{weight}_bias" for weight in weights]
        return tuple(weights + [bias for bias in biases if bias in self._parts])

    def _pack(self, packer: Packer, key: str, read: Read) -> list[torch.Tensor]:
        """An entry as C++ reads it. C++ multiplies by norms as they are, so the offset is added
        here."""

        def take(name: str) -> torch.Tensor:
            return assemble(self._parts[name], read)

        if key.endswith("norm"):
            return [take(key).float() + self._spec.norm_offset]
        if key == "embedding":
            return [take(key).to(self._dtype, copy=True)]
        if key == "head":
            head = take(key)
            rows_missing = self._shard.vocabulary - len(head)
            padded = torch.nn.functional.pad(head, (0, 0, 0, rows_missing))
            return packer.matrix(self._kind(head=True), [padded], [None])
        prefix, _, name = key.rpartition(".")
        weights = [f"{prefix}.{part}" for part in _MATRICES[name]]
        biases = [take(bias) if (bias := f"{w}_bias") in self._parts else None for w in weights]
        return packer.matrix(self._kind(), [take(weight) for weight in weights], biases)

    def _matrix(self, key: str) -> _Matrix:
        prefix, _, name = key.rpartition(".")
        parts = [f"{prefix}.{part}" for part in _MATRICES[name]] if name in _MATRICES else [key]
        rows, columns = shape_of(self._parts[parts[0]])
        if key == "head":
            rows = self._shard.vocabulary
        if len(parts) > 1:
            rows = -(-rows // PANEL) * PANEL * len(parts)
        data, *bias = self._live[key]
        kind = self._kind(head=key == "head")
        return _Matrix(
            data.data_ptr(), bias[0].data_ptr() if bias else None, kind, rows, columns, 0
        )

    def _address(self, key: str) -> int | None:
        return self._live[key][0].data_ptr() if key in self._live else None

    def _layers(self, tables: list[torch.Tensor]) -> ctypes.Array[_Layer]:
        layers = (_Layer * len(self._spec.layers))()
        self._tables = [table.contiguous() for table in tables]
        for index, (layer, kind) in enumerate(zip(layers, self._spec.layers, strict=True)):
            for name in _MATRICES:
                setattr(layer, name, self._matrix(f"layers.{index}.{name}"))
            for name in _NORMS:
                setattr(layer, name, self._address(f"layers.{index}.{name}"))
            layer.cos_sin = self._tables[kind.rotary].data_ptr()
            layer.keys = self._cache.keys[index].data_ptr()
            layer.values = self._cache.values[index].data_ptr()
            layer.window = kind.window
        return layers

    def _model(self, layers: ctypes.Array[_Layer]) -> _Model:
        spec = self._spec
        return _Model(
            layers=layers,
            head=self._matrix("head"),
            embedding=self._address("embedding"),
            final_norm=self._address("final_norm"),
            layer_count=len(layers),
            hidden=spec.hidden,
            heads=self._shard.heads,
            kv_heads=self._shard.kv_heads,
            head_dim=spec.head_dim,
            intermediate=self._shard.intermediate,
            gelu=int(spec.activation == "gelu_tanh"),
            cache_kind=_KINDS[self._dtype],
            embedding_kind=_KINDS[self._dtype],
            epsilon=spec.norm_epsilon,
            attention_scale=spec.attention_scale,
            attention_cap=spec.attention_cap,
            logit_cap=spec.logit_cap,
            embedding_scale=self._embedding_scale(),
        )

    def _embedding_scale(self) -> float:
        """transformers rounds Gemma's factor to the dtype of the weights."""
        return float(torch.tensor(self._spec.embedding_scale, dtype=self._dtype))


def _ask(request: DrawRequest) -> _DrawRequest:
    return _DrawRequest(
        request.temperature,
        request.top_p,
        request.min_p,
        request.top_k,
        -1 if request.forced is None else request.forced,
        request.describe,
        request.point,
    )


def _describe(batch: Batch) -> _Batch:
    return _Batch(
        batch.token_ids.data_ptr(),
        batch.positions.data_ptr(),
        batch.kv_slots.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.context_lengths.data_ptr(),
        batch.block_tables.data_ptr(),
        batch.tokens,
        batch.rows,
        batch.block_tables.shape[1],
        batch.block_size,
    )

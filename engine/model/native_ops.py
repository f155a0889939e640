"""The C++ decoder of ``csrc/``: its structures filled, its calls made.

Path: native.py -> here -> native_library.py. Every pointer given to C++ belongs to a tensor that
this object keeps; a weight update commits into the same storages.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p

import torch

from engine.model import native_library as lib
from engine.model.inputs import Batch
from engine.model.kv_cache import KVCache
from engine.model.layout import Layout, Shard
from engine.model.native_library import Library, Memory, PanelTarget
from engine.model.sampler import DrawRequest, DrawResult
from engine.model.spec import DecoderSpec
from engine.model.targets import Target, TensorTarget, VectorTarget
from engine.scheduler.ranks import Group

_KINDS = {torch.float32: lib.FLOAT32, torch.bfloat16: lib.BFLOAT16}
_MATRICES = {"qkv": ("qkv",), "output": ("output",), "gate_up": ("gate", "up"), "down": ("down",)}
_NORMS = (
    "input_norm",
    "mlp_norm",
    "after_attention_norm",
    "after_mlp_norm",
    "query_norm",
    "key_norm",
)


def covers(spec: DecoderSpec) -> bool:
    """Whether the heads fill whole registers, and the workspace of csrc/attention_chunk.hpp."""
    return spec.head_dim % lib.PANEL == 0 and spec.head_dim <= lib.MOST_HEAD_DIM


class CpuDecoder:
    """One rank's decoder in C++; see ``native.Decoder``."""

    name = "native"

    def __init__(
        self,
        library: ctypes.CDLL,
        spec: DecoderSpec,
        shard: Shard,
        parts: Layout,
        *,
        tables: list[torch.Tensor],
        cache: KVCache,
        group: Group | None,
        dtype: torch.dtype,
        weight_form: str,
        threads: int,
        deterministic: bool,
    ) -> None:
        """``deterministic``: rows do not depend on their batch, which costs AMX its use."""
        self._library = Library(library)
        self._memory = Memory(self._library)
        self._spec = spec
        self._shard = shard
        self._parts = parts
        self._group = group
        self._cache, self._tables = cache, tables  # C++ reads and writes their storages
        self._dtype = dtype
        self.weight_form = weight_form
        self.targets: list[Target] = []
        model = self._model(self._layers())
        self._handle = c_void_p()
        made = byref(self._handle)
        self._library.call("qd_create", byref(model), threads, int(deterministic), made)
        self.storages = self._memory.kept
        self.parameter_bytes = self._memory.bytes

    # ------------------------------------------------------------------ calls

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
        """See ``sampler.draw_rows``."""
        count = len(requests)
        asked = (lib.RowRequest * count)(*map(_ask, requests))
        drawn = (lib.RowResult * count)()
        rows = logits.contiguous()
        self._library.call("qd_sample", self._handle, rows, count, rows.shape[1], asked, drawn)
        return [DrawResult(d.token_id, d.logprob, d.entropy, d.logsumexp) for d in drawn]

    def close(self) -> None:
        """Ends the threads; the decoder cannot be used afterwards."""
        if self._handle:
            self._library.call("qd_destroy", self._handle)
            self._handle = c_void_p()

    # ------------------------------------------------------------------ structures

    def _layers(self) -> ctypes.Array[lib.Layer]:
        layers = (lib.Layer * len(self._spec.layers))()
        for index, (layer, kind) in enumerate(zip(layers, self._spec.layers, strict=True)):
            prefix = f"layers.{index}."
            for name, parts in _MATRICES.items():
                names = [prefix + part for part in parts]
                setattr(layer, name, self._matrix(names, self._kind()))
            for name in _NORMS:
                setattr(layer, name, self._norm(prefix + name))
            layer.cos_sin = self._tables[kind.rotary].data_ptr()
            layer.keys = self._cache.keys[index].data_ptr()
            layer.values = self._cache.values[index].data_ptr()
            layer.window = kind.window
        return layers

    def _model(self, layers: ctypes.Array[lib.Layer]) -> lib.Model:
        spec = self._spec
        scale = torch.tensor(spec.embedding_scale, dtype=self._dtype)  # as transformers rounds it
        return lib.Model(
            layers=layers,
            head=self._matrix(["head"], self._kind(head=True), rows=self._shard.vocabulary),
            embedding=self._embedding(),
            final_norm=self._norm("final_norm"),
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
            embedding_scale=float(scale),
        )

    def _kind(self, *, head: bool = False) -> int:
        """Int4 models keep their output layer in int8: int4 there cost 4.7 % of perplexity."""
        if self.weight_form == "plain":
            return _KINDS[self._dtype]
        return lib.INT8 if head else lib.INT4

    def _matrix(self, names: list[str], kind: int, *, rows: int = 0) -> lib.Matrix:
        """One matrix of a layout entry, or of several of one shape whose panels alternate.

        ``rows`` asks for more rows than the entry has; they are zeros.
        """
        sources = self._parts[names[0]]
        own = sum(source.part_shape[0] for source in sources)
        rows, columns = max(rows, own), sources[0].part_shape[1]
        panels = -(-rows // lib.PANEL)
        packed = self._memory.panels(kind, panels * len(names), columns)
        for which, name in enumerate(names):
            first = 0
            for source in self._parts[name]:
                last = first + -(-source.part_shape[0] // lib.PANEL)
                where = packed.view(panels, len(names), -1)[first:last, which]
                self.targets.append(PanelTarget(source, where, kind, self._library))
                first = last
        whole = rows if len(names) == 1 else panels * lib.PANEL * len(names)
        return lib.Matrix(packed.data_ptr(), self._bias(names, panels), kind, whole, columns, 0)

    def _bias(self, names: list[str], panels: int) -> int | None:
        if f"{names[0]}_bias" not in self._parts:
            return None
        storage = self._memory.keep(torch.zeros(panels, len(names), lib.PANEL))
        for which, name in enumerate(names):
            first = 0
            for source in self._parts[f"{name}_bias"]:
                last = first + -(-source.part_shape[0] // lib.PANEL)
                self.targets.append(VectorTarget(source, storage[first:last, which]))
                first = last
        return storage.data_ptr()

    def _norm(self, name: str) -> int | None:
        """C++ multiplies by the weight as it is, so the offset is added when it is staged."""
        if name not in self._parts:
            return None
        (source,) = self._parts[name]
        storage = self._memory.keep(torch.zeros(source.part_shape))
        self.targets.append(VectorTarget(source, storage, self._spec.norm_offset))
        return storage.data_ptr()

    def _embedding(self) -> int | None:
        """None where the rows of the packed output layer serve as well."""
        if self._spec.tied and self._group is None and self.weight_form == "plain":
            return None
        (source,) = self._parts["embedding"]
        storage = self._memory.keep(torch.zeros(source.part_shape, dtype=self._dtype))
        self.targets.append(TensorTarget(source, storage))
        return storage.data_ptr()


def _ask(request: DrawRequest) -> lib.RowRequest:
    return lib.RowRequest(
        request.temperature,
        request.top_p,
        request.min_p,
        request.top_k,
        -1 if request.forced is None else request.forced,
        request.describe,
        request.point,
    )


def _describe(batch: Batch) -> lib.RaggedBatch:
    return lib.RaggedBatch(
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

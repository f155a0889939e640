"""The decoder in torch operators and our kernels: the CUDA path, the fallback, the C++ oracle.

Path: native.py -> here -> kernels/. On CPU the operators are their references and torch's linear.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from engine.config import EngineConfig
from engine.model import quant
from engine.model.inputs import Batch
from engine.model.kv_cache import KVCache
from engine.model.layout import Layout, Shard
from engine.model.sampler import draw_rows, draw_together
from engine.model.spec import DecoderSpec
from engine.model.targets import Target, TensorTarget
from engine.scheduler.ranks import Group
from kernels.attention_tile import PagedContext, Scores
from kernels.gated_activation import gelu_tanh_and_mul, silu_and_mul
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.store_kv import store_kv

Rounding = Callable[[torch.Tensor], torch.Tensor]
SPLIT_TOKENS = 256  # of the decode kernel when rows must not depend on their batch


class EagerDecoder:
    """One rank's decoder; see ``native.Decoder``. Norm weights are as the checkpoint has them."""

    name = "eager"

    def __init__(
        self,
        spec: DecoderSpec,
        shard: Shard,
        parts: Layout,
        *,
        tables: list[torch.Tensor],
        cache: KVCache,
        group: Group | None,
        config: EngineConfig,
        dtype: torch.dtype,
    ) -> None:
        self._spec = spec
        self._shard = shard
        self._tables = tables
        self._cache = cache
        self._group = group
        self._split_tokens = SPLIT_TOKENS if config.deterministic else None
        self.weight_form: str = config.weights
        self.draw = draw_rows if config.device == "cpu" else draw_together
        self.targets: list[Target] = []
        self._weights: dict[str, torch.Tensor] = {}
        for name in parts:
            self._place(name, parts, dtype, torch.device(config.device))
        self.storages = list({id(w): w for w in self._weights.values()}.values())
        self.parameter_bytes = sum(w.numel() * w.element_size() for w in self.storages)

    def _place(self, name: str, parts: Layout, dtype: torch.dtype, device: torch.device) -> None:
        """Memory for a layout entry, and the targets that fill it row by row."""
        sources = parts[name]
        if name == "head" and sources == parts["embedding"] and self.weight_form == "plain":
            self._weights[name] = self._weights["embedding"]
            return
        rows = sum(source.part_shape[0] for source in sources)
        rows = self._shard.vocabulary if name == "head" else rows
        storage = torch.zeros(rows, *sources[0].part_shape[1:], dtype=dtype, device=device)
        self._weights[name] = storage
        first = 0
        for source in sources:
            where = storage[first : first + source.part_shape[0]]
            self.targets.append(TensorTarget(source, where, self._rounding(name, storage)))
            first += source.part_shape[0]

    def _rounding(self, name: str, storage: torch.Tensor) -> Rounding | None:
        """Gives int4 models the values of their quantised matrices, as native_ops.py has them."""
        if self.weight_form == "plain" or storage.dim() < 2 or name == "embedding":
            return None
        return quant.int8 if name == "head" else quant.int4

    def close(self) -> None:
        """Nothing is held beyond the process."""

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The residual stream behind the last layer, [tokens, hidden]."""
        x = functional.embedding(batch.token_ids, self._weights["embedding"])
        if self._spec.embedding_scale != 1.0:
            x = x * torch.tensor(self._spec.embedding_scale, dtype=x.dtype)
        for index in range(len(self._spec.layers)):
            normed = self._norm(x, f"layers.{index}.input_norm")
            delta = self._attention(batch, index, normed)
            normed = self._join(x, delta, index, "after_attention_norm", "mlp_norm")
            x = x + self._after(self._mlp(index, normed), f"layers.{index}.after_mlp_norm")
        return x

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """What the output layer reads."""
        return self._norm(x, "final_norm")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, this rank's vocabulary] of residuals [tokens, hidden]."""
        logits = functional.linear(self.normed(x), self._weights["head"]).float()
        cap = self._spec.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        spec = self._spec
        return rms_norm(x, self._weights[name], spec.norm_epsilon, weight_offset=spec.norm_offset)

    def _after(self, delta: torch.Tensor, name: str) -> torch.Tensor:
        """The ranks' sum, normed where the layer has a norm there."""
        if self._group is not None:
            self._group.all_reduce(delta)
        return self._norm(delta, name) if name in self._weights else delta

    def _join(
        self, x: torch.Tensor, delta: torch.Tensor, index: int, after: str, norm: str
    ) -> torch.Tensor:
        """x += delta in place; returns the norm of the sum."""
        spec = self._spec
        return add_rms_norm(
            self._after(delta, f"layers.{index}.{after}"),
            x,
            self._weights[f"layers.{index}.{norm}"],
            spec.norm_epsilon,
            weight_offset=spec.norm_offset,
        )

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._weights[name], self._weights.get(f"{name}_bias"))

    def _attention(self, batch: Batch, index: int, normed: torch.Tensor) -> torch.Tensor:
        layer, dim = f"layers.{index}", self._spec.head_dim
        heads = [self._shard.heads, self._shard.kv_heads, self._shard.kv_heads]
        qkv = self._linear(normed, f"{layer}.qkv").view(batch.tokens, -1, dim)
        query, key, value = torch.split(qkv, heads, dim=1)
        if self._spec.qk_norm:
            query = self._norm(query, f"{layer}.query_norm")
            key = self._norm(key, f"{layer}.key_norm")
        rotary(query, key, batch.positions, self._tables[self._spec.layers[index].rotary])
        keys, values = self._cache.keys[index], self._cache.values[index]
        store_kv(key, value, keys, values, batch.kv_slots)
        attended = self._attend(batch, index, query)
        return self._linear(attended.flatten(1), f"{layer}.output")

    def _attend(self, batch: Batch, index: int, query: torch.Tensor) -> torch.Tensor:
        context = PagedContext(
            key=self._cache.keys[index],
            value=self._cache.values[index],
            block_tables=batch.block_tables,
            lengths=batch.context_lengths,
            block_size=batch.block_size,
        )
        scores = Scores(
            scale=self._spec.attention_scale,
            window=self._spec.layers[index].window,
            soft_cap=self._spec.attention_cap,
        )
        if batch.tokens == batch.rows:
            return paged_attention(
                query,
                context,
                scores,
                longest=batch.longest_context or None,
                split_tokens=self._split_tokens,
            )
        return paged_prefill(
            query,
            batch.query_starts,
            context,
            scores,
            longest_chunk=batch.longest_chunk or batch.tokens,
        )

    def _mlp(self, index: int, normed: torch.Tensor) -> torch.Tensor:
        gate = self._linear(normed, f"layers.{index}.gate")
        up = self._linear(normed, f"layers.{index}.up")
        active = silu_and_mul if self._spec.activation == "silu" else gelu_tanh_and_mul
        return self._linear(active(gate, up), f"layers.{index}.down")

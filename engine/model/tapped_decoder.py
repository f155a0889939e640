"""The decoder of native.py with its inside shown: runs the steps that an armed dump wants.

Path: native.py -> here -> dumps/capture.py. It computes as eager_decoder.py does, with the same
collectives in the same order, and calls the tap wherever the transformers model has a module, under
that module's name.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from engine.dumps.capture import RowSpan, Tap, View
from engine.dumps.points import DumpPoint, Kind
from engine.model.eager_decoder import EagerDecoder
from engine.model.inputs import Batch
from engine.model.spec import DecoderSpec
from kernels.gated_activation import gelu_tanh_and_mul, silu_and_mul
from kernels.rotary import rotary
from kernels.store_kv import store_kv

COLUMNS: dict[Kind, int | None] = {"input": None, "output": 1, "weight": 0}
ROWS: dict[Kind, int | None] = {"input": 1, "output": None, "weight": 1}
WHOLE: dict[Kind, int | None] = {"input": None, "output": None, "weight": None}
HEADS: dict[Kind, int | None] = {"input": 1, "output": 1, "weight": None}
STREAM: dict[Kind, int | None] = {"input": None, "output": None}


def decoder_points(spec: DecoderSpec, ranks: int) -> list[DumpPoint]:
    """The points of a model in the order in which transformers' modules finish.

    Where several of the ``ranks`` hold the same one of several KV heads, no dimension says who
    holds what: those points are left out.
    """
    points = [DumpPoint(name="model.embed_tokens", shard_dim=WHOLE)]
    for index in range(len(spec.layers)):
        prefix = f"model.layers.{index}"
        points += [
            DumpPoint(name=f"{prefix}{name}", layer=index, shard_dim=kinds)
            for name, kinds in _layer_points(spec, ranks).items()
        ]
    logits: dict[Kind, int | None] = {"input": None, "logits": None, "weight": 0}
    points += [
        DumpPoint(name="model.norm", shard_dim=WHOLE),
        DumpPoint(name="lm_head", shard_dim=logits),
    ]
    return points


def _layer_points(spec: DecoderSpec, ranks: int) -> dict[str, dict[Kind, int | None]]:
    attention = {f".self_attn{name}": kinds for name, kinds in _attention_points(spec, ranks)}
    sandwich = spec.sandwich
    return {
        ".input_layernorm": WHOLE,
        **attention,
        ".post_attention_layernorm": WHOLE,
        **({".pre_feedforward_layernorm": WHOLE} if sandwich else {}),
        ".mlp.gate_proj": COLUMNS,
        ".mlp.act_fn": {"input": 1, "output": 1},
        ".mlp.up_proj": COLUMNS,
        ".mlp.down_proj": ROWS,
        ".mlp": STREAM,
        **({".post_feedforward_layernorm": WHOLE} if sandwich else {}),
        "": STREAM,
    }


def _attention_points(
    spec: DecoderSpec, ranks: int
) -> Iterator[tuple[str, dict[Kind, int | None]]]:
    """Qwen norms each of query and key behind its projection, Gemma both behind all three."""
    split = spec.kv_heads >= ranks
    order = ["q_proj", "k_proj", "v_proj"]
    if spec.qk_norm:
        order = (
            [*order, "q_norm", "k_norm"]
            if spec.sandwich
            else ["q_proj", "q_norm", "k_proj", "k_norm", "v_proj"]
        )
    for name in order:
        kinds = HEADS if name.endswith("norm") else COLUMNS
        if name[0] == "q" or split:
            yield f".{name}", kinds
        elif spec.kv_heads == 1:
            yield f".{name}", WHOLE
    yield ".o_proj", ROWS
    kv: dict[Kind, int | None] = {"kv": 1} if split else {"kv": None} if spec.kv_heads == 1 else {}
    yield "", STREAM | kv


class TappedDecoder(EagerDecoder):
    """One rank's eager decoder; ``tapped`` is its forward."""

    def tapped(
        self, batch: Batch, keep: torch.Tensor, view: View
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits fp32 [keep, vocab] and what the output layer reads, [tokens, hidden]."""
        embedding = self._weights["embedding"]
        x = functional.embedding(batch.token_ids, embedding)
        if self._spec.embedding_scale != 1.0:
            x = x * torch.tensor(self._spec.embedding_scale, dtype=x.dtype)
        view.show("model.embed_tokens", batch.token_ids, x, embedding)
        for index in range(len(self._spec.layers)):
            x = self._layer(batch, index, x, view)
        normed = self.normed(x)
        view.show("model.norm", x, normed, self._weights["final_norm"])
        return self._tapped_logits(normed[keep], view), normed

    def _tapped_logits(self, normed: torch.Tensor, view: View) -> torch.Tensor:
        head = self._weights["head"]
        logits = functional.linear(normed, head).float()
        if self._group is not None and len(normed):
            logits = self._group.gather_columns(logits)[:, : self._spec.vocabulary]
        view.tap("lm_head", "weight", head, None)
        view.tap("lm_head", "input", normed, view.kept)
        view.tap("lm_head", "logits", logits, view.kept)
        cap = self._spec.logit_cap
        return cap * torch.tanh(logits / cap) if cap else logits

    def _layer(self, batch: Batch, index: int, x: torch.Tensor, view: View) -> torch.Tensor:
        layer, name = f"layers.{index}", f"model.layers.{index}"
        normed = self._shown_norm(x, f"{layer}.input_norm", f"{name}.input_layernorm", view)
        delta = self._tapped_attention(batch, index, normed, view)
        if self._spec.sandwich:
            own = f"{layer}.after_attention_norm"
            delta = self._shown_norm(delta, own, f"{name}.post_attention_layernorm", view)
        residual = x + delta
        word = "pre_feedforward" if self._spec.sandwich else "post_attention"
        normed = self._shown_norm(residual, f"{layer}.mlp_norm", f"{name}.{word}_layernorm", view)
        delta = self._tapped_mlp(index, normed, view)
        if self._spec.sandwich:
            own = f"{layer}.after_mlp_norm"
            delta = self._shown_norm(delta, own, f"{name}.post_feedforward_layernorm", view)
        out = residual + delta
        view.show(name, x, out)
        return out

    def _shown_norm(self, x: torch.Tensor, own: str, name: str, view: View) -> torch.Tensor:
        normed = self._norm(x, own)
        view.show(name, x, normed, self._weights[own])
        return normed

    def _summed(self, delta: torch.Tensor) -> torch.Tensor:
        if self._group is not None:
            self._group.all_reduce(delta)
        return delta

    def _tapped_attention(
        self, batch: Batch, index: int, normed: torch.Tensor, view: View
    ) -> torch.Tensor:
        layer, name, dim = f"layers.{index}", f"model.layers.{index}.self_attn", self._spec.head_dim
        heads = [self._shard.heads, self._shard.kv_heads, self._shard.kv_heads]
        widths = [count * dim for count in heads]
        qkv = self._linear(normed, f"{layer}.qkv")
        weights = torch.split(self._weights[f"{layer}.qkv"], widths)
        parts = torch.split(qkv, widths, dim=1)
        query, key, value = torch.split(qkv.view(batch.tokens, -1, dim), heads, dim=1)
        for part, made, weight in zip("qkv", parts, weights, strict=True):
            view.show(f"{name}.{part}_proj", normed, made, weight)
        if self._spec.qk_norm:
            query = self._shown_norm(query, f"{layer}.query_norm", f"{name}.q_norm", view)
            key = self._shown_norm(key, f"{layer}.key_norm", f"{name}.k_norm", view)
        rotary(query, key, batch.positions, self._tables[self._spec.layers[index].rotary])
        keys, values = self._cache.keys[index], self._cache.values[index]
        store_kv(key, value, keys, values, batch.kv_slots)
        attended = self._attend(batch, index, query).flatten(1)
        delta = self._summed(self._linear(attended, f"{layer}.output"))
        view.show(f"{name}.o_proj", attended, delta, self._weights[f"{layer}.output"])
        show_kv(view.tap, name, batch, keys, values, view.rows)
        view.show(name, normed, delta)
        return delta

    def _tapped_mlp(self, index: int, normed: torch.Tensor, view: View) -> torch.Tensor:
        layer, name = f"layers.{index}", f"model.layers.{index}.mlp"
        gate = self._linear(normed, f"{layer}.gate")
        up = self._linear(normed, f"{layer}.up")
        silu = self._spec.activation == "silu"
        active = functional.silu(gate) if silu else functional.gelu(gate, approximate="tanh")
        product = (silu_and_mul if silu else gelu_tanh_and_mul)(gate, up)
        view.show(f"{name}.gate_proj", normed, gate, self._weights[f"{layer}.gate"])
        view.show(f"{name}.act_fn", gate, active)
        view.show(f"{name}.up_proj", normed, up, self._weights[f"{layer}.up"])
        delta = self._summed(self._linear(product, f"{layer}.down"))
        view.show(f"{name}.down_proj", product, delta, self._weights[f"{layer}.down"])
        view.show(name, normed, delta)
        return delta


def show_kv(
    tap: Tap,
    name: str,
    batch: Batch,
    keys: torch.Tensor,
    values: torch.Tensor,
    rows: list[RowSpan],
) -> None:
    """The cache of each request: [context, heads, key width + value width]."""
    if not tap.wants(name, "kv"):
        return
    for row, span in enumerate(rows):
        slots = batch.context_slots(row)
        both = torch.cat([keys[slots], values[slots]], dim=-1)
        tap(name, "kv", both, [RowSpan(span.rid, 0, len(slots), 0)])

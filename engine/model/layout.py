"""Which checkpoint tensors make up each matrix that native.py multiplies with, on one tp rank.

Path: native.py loads by it; weights/update.py will stage by it. Names on the left of a layout are
ours (``layers.3.qkv``), sources carry Hugging Face names, so an update or a dump can speak those.

Column-parallel matrices (qkv, gate, up, head) keep a share of their rows, row-parallel ones (output
projection, down) a share of their columns; norms and the embedding are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import ConfigError
from engine.model.spec import DecoderSpec

Read = Callable[[str], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a checkpoint tensor: ``rows`` and ``columns`` are (first, last) or None for all."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    rows: tuple[int, int] | None = None
    columns: tuple[int, int] | None = None

    @property
    def part_shape(self) -> tuple[int, ...]:
        """The shape of this rank's part."""
        spans = (self.rows, self.columns)
        return tuple(
            size if span is None else span[1] - span[0]
            for size, span in zip(self.shape, spans, strict=False)
        )

    def take(self, read: Read) -> torch.Tensor:
        """This rank's part. Raises ConfigError if the tensor has another shape."""
        tensor = read(self.name)
        if tuple(tensor.shape) != self.shape:
            raise ConfigError(
                f"{self.name} is {tuple(tensor.shape)}, config.json asks for {self.shape}"
            )
        if self.rows is not None:
            tensor = tensor[self.rows[0] : self.rows[1]]
        if self.columns is not None:
            tensor = tensor[:, self.columns[0] : self.columns[1]]
        return tensor


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank holds of the model's widths."""

    rank: int
    size: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int  # rows of the output layer; padded ids of the last rank are cut by the caller

    @staticmethod
    def of(spec: DecoderSpec, rank: int, size: int) -> Shard:
        spec.check_tp(size)
        return Shard(
            rank=rank,
            size=size,
            heads=spec.heads // size,
            kv_heads=max(1, spec.kv_heads // size),
            intermediate=spec.intermediate // size,
            vocabulary=-(-spec.vocabulary // size),
        )


Layout = dict[str, tuple[Source, ...]]  # sources of one entry are joined along their rows


def layout(spec: DecoderSpec, shard: Shard) -> Layout:
    """Every tensor of a rank: ``embedding``, ``final_norm``, ``head`` and those of the layers."""
    parts: Layout = {
        "embedding": (Source("model.embed_tokens.weight", (spec.vocabulary, spec.hidden)),),
        "final_norm": (Source("model.norm.weight", (spec.hidden,)),),
        "head": (_head(spec, shard),),
    }
    for index in range(len(spec.layers)):
        for name, sources in _layer(spec, shard, f"model.layers.{index}").items():
            parts[f"layers.{index}.{name}"] = sources
    return parts


def _head(spec: DecoderSpec, shard: Shard) -> Source:
    name = "model.embed_tokens.weight" if spec.tied else "lm_head.weight"
    if shard.size == 1:
        return Source(name, (spec.vocabulary, spec.hidden))
    first = shard.rank * shard.vocabulary
    rows = (min(first, spec.vocabulary), min(first + shard.vocabulary, spec.vocabulary))
    return Source(name, (spec.vocabulary, spec.hidden), rows=rows)


def _layer(spec: DecoderSpec, shard: Shard, prefix: str) -> Layout:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    parts: Layout = {
        "input_norm": (Source(f"{prefix}.input_layernorm.weight", (spec.hidden,)),),
        "mlp_norm": (Source(_mlp_norm_name(spec, prefix), (spec.hidden,)),),
        "qkv": _qkv(spec, shard, attention, "weight"),
        "output": (_by_columns(f"{attention}.o_proj.weight", spec.hidden, _q_width(spec), shard),),
        "gate": (_by_rows(f"{mlp}.gate_proj.weight", spec.intermediate, spec.hidden, shard),),
        "up": (_by_rows(f"{mlp}.up_proj.weight", spec.intermediate, spec.hidden, shard),),
        "down": (_by_columns(f"{mlp}.down_proj.weight", spec.hidden, spec.intermediate, shard),),
    }
    if spec.sandwich:
        names = {"after_attention_norm": "post_attention", "after_mlp_norm": "post_feedforward"}
        for own, theirs in names.items():
            parts[own] = (Source(f"{prefix}.{theirs}_layernorm.weight", (spec.hidden,)),)
    if spec.qk_norm:
        parts["query_norm"] = (Source(f"{attention}.q_norm.weight", (spec.head_dim,)),)
        parts["key_norm"] = (Source(f"{attention}.k_norm.weight", (spec.head_dim,)),)
    if spec.qkv_bias:
        parts["qkv_bias"] = _qkv(spec, shard, attention, "bias")
    if spec.output_bias and shard.rank == 0:  # the ranks' products are summed
        parts["output_bias"] = (Source(f"{attention}.o_proj.bias", (spec.hidden,)),)
    if spec.mlp_bias:
        for name in ("gate", "up"):
            parts[f"{name}_bias"] = (
                _by_rows(f"{mlp}.{name}_proj.bias", spec.intermediate, None, shard),
            )
        if shard.rank == 0:
            parts["down_bias"] = (Source(f"{mlp}.down_proj.bias", (spec.hidden,)),)
    return parts


def _mlp_norm_name(spec: DecoderSpec, prefix: str) -> str:
    name = "pre_feedforward" if spec.sandwich else "post_attention"
    return f"{prefix}.{name}_layernorm.weight"


def _q_width(spec: DecoderSpec) -> int:
    return spec.heads * spec.head_dim


def _qkv(spec: DecoderSpec, shard: Shard, attention: str, kind: str) -> tuple[Source, ...]:
    """Query heads of this rank, then the key and value heads that they look at."""
    first_kv = shard.rank * spec.kv_heads // shard.size
    rows = {
        "q_proj": (spec.heads, shard.rank * shard.heads, shard.heads),
        "k_proj": (spec.kv_heads, first_kv, shard.kv_heads),
        "v_proj": (spec.kv_heads, first_kv, shard.kv_heads),
    }
    sources = []
    for name, (whole, first, count) in rows.items():
        shape = (
            (whole * spec.head_dim, spec.hidden) if kind == "weight" else (whole * spec.head_dim,)
        )
        span = (first * spec.head_dim, (first + count) * spec.head_dim)
        sources.append(Source(f"{attention}.{name}.{kind}", shape, rows=span))
    return tuple(sources)


def _by_rows(name: str, rows: int, columns: int | None, shard: Shard) -> Source:
    share = rows // shard.size
    shape = (rows,) if columns is None else (rows, columns)
    return Source(name, shape, rows=(shard.rank * share, (shard.rank + 1) * share))


def _by_columns(name: str, rows: int, columns: int, shard: Shard) -> Source:
    share = columns // shard.size
    return Source(name, (rows, columns), columns=(shard.rank * share, (shard.rank + 1) * share))

"""The fast backend: one lean decoder for Llama, Mistral, Qwen, SmolLM and Gemma.

Path: torch_runner.py -> here -> native_ops.py (C++ on CPU) or eager_decoder.py (torch and Triton).
Both hold this rank's share of the weights, by the names of layout.py, and attend over the paged
cache without gathering it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from engine.config import EngineConfig
from engine.dumps.capture import View
from engine.model import quant
from engine.model.eager_decoder import EagerDecoder
from engine.model.inputs import Batch
from engine.model.kv_cache import KVCache, LayerShape
from engine.model.layout import Layout, Shard, assemble, layout
from engine.model.loader import Checkpoint, ModelDirectory
from engine.model.native_build import load_library
from engine.model.native_instrument import NativeInstrument
from engine.model.native_ops import CpuDecoder
from engine.model.packed_weights import PackedWeights
from engine.model.sampler import DrawRequest, DrawResult
from engine.model.spec import DecoderSpec, RotarySpec
from engine.model.tapped_decoder import TappedDecoder, decoder_points
from engine.scheduler.ranks import Group
from kernels.rotary import cos_sin_table

EagerT = TypeVar("EagerT", bound=EagerDecoder)


class Decoder(Protocol):
    """One rank's decoder over its share of the weights."""

    weight_form: str
    parameter_bytes: int
    weights: PackedWeights

    def hidden(self, batch: Batch) -> torch.Tensor:
        """The residual stream behind the last layer, [tokens, hidden]."""
        ...

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """What the output layer reads, [tokens, hidden]."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [tokens, this rank's vocabulary]."""
        ...

    def draw(self, logits: torch.Tensor, requests: list[DrawRequest]) -> list[DrawResult]:
        """See ``sampler.draw_rows``."""
        ...


class NativeBackend:
    """A decoder with its cache and, if tp > 1, its group."""

    def __init__(
        self,
        config: EngineConfig,
        directory: ModelDirectory,
        spec: DecoderSpec,
        *,
        dtype: torch.dtype,
        group: Group | None,
    ) -> None:
        self._spec = spec
        self._group = group
        shard = Shard.of(spec, *((group.rank, group.size) if group else (0, 1)))
        self._cache = KVCache(
            [LayerShape(shard.kv_heads, spec.head_dim, spec.head_dim) for _ in spec.layers],
            num_blocks=config.limits.kv_tokens // config.limits.block_tokens,
            block_size=config.limits.block_tokens,
            dtype=dtype,
            device=torch.device(config.device),
        )
        self._decoder = _make_decoder(config, directory, spec, shard, self._cache, dtype, group)
        self.name = "native" if isinstance(self._decoder, CpuDecoder) else "eager"
        self.draw = self._decoder.draw
        self.weight_form = self._decoder.weight_form
        self.parameter_bytes = self._decoder.parameter_bytes
        self.weights = self._decoder.weights
        self.weights.show(Checkpoint(directory.path).read)
        self.instrument = NativeInstrument(
            decoder_points(spec, shard.size),
            partial(self._make_tapped, config, directory, shard, dtype),
            form=f"native eager {config.dtype} {config.weights}",
            is_live=isinstance(self._decoder, EagerDecoder),
        )

    def _make_tapped(
        self,
        config: EngineConfig,
        directory: ModelDirectory,
        shard: Shard,
        dtype: torch.dtype,
        paths: tuple[str, ...],
    ) -> TappedDecoder:
        """Over the live weights where they are tensors, else over those of ``paths``."""
        live = self._decoder.weights.live
        weights = None
        if isinstance(self._decoder, EagerDecoder):
            weights = {name: tensors[0] for name, tensors in live.items()}
        return _make_eager(
            TappedDecoder, config, directory, self._spec, shard, self._cache, dtype, self._group,
            Checkpoint(*map(Path, paths)) if paths else Checkpoint(directory.path), weights,
        )  # fmt: skip

    def forward_tapped(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool, view: View
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits, normed = self.instrument.decoder.tapped(batch, keep, view)
        return logits, normed if want_hidden else None

    def memory(self, tag: str) -> list[torch.Tensor]:
        if tag == "kv_cache":
            return [*self._cache.keys, *self._cache.values]
        return [tensor for tensors in self._decoder.weights.live.values() for tensor in tensors]

    def forward(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits fp32 [keep, vocab] and, if wanted, hidden states [tokens, hidden]."""
        x = self._decoder.hidden(batch)
        logits = self._decoder.logits(x[keep]) if len(keep) else x.new_empty(0, 0)
        if self._group is not None and len(keep):
            logits = self._group.gather_columns(logits)[:, : self._spec.vocabulary]
        return logits, self._decoder.normed(x) if want_hidden else None


def _make_decoder(
    config: EngineConfig,
    directory: ModelDirectory,
    spec: DecoderSpec,
    shard: Shard,
    cache: KVCache,
    dtype: torch.dtype,
    group: Group | None,
) -> Decoder:
    wants_library = config.device == "cpu" and config.backend != "eager"
    library = load_library(Path(config.home)) if wants_library else None
    parts, checkpoint = layout(spec, shard), Checkpoint(directory.path)
    if library is not None:
        return CpuDecoder(
            library,
            spec,
            shard,
            parts,
            checkpoint.read,
            tables=_tables(config, directory, spec),
            cache=cache,
            group=group,
            config=config,
            dtype=dtype,
        )
    return _make_eager(
        EagerDecoder, config, directory, spec, shard, cache, dtype, group, checkpoint
    )


def _tables(
    config: EngineConfig, directory: ModelDirectory, spec: DecoderSpec
) -> list[torch.Tensor]:
    reach = min(config.limits.max_context or directory.max_context, config.limits.kv_tokens)
    return [cos_sin_table(inverse_frequencies(r, spec.head_dim), reach) for r in spec.rotaries]


def _make_eager(
    kind: type[EagerT],
    config: EngineConfig,
    directory: ModelDirectory,
    spec: DecoderSpec,
    shard: Shard,
    cache: KVCache,
    dtype: torch.dtype,
    group: Group | None,
    checkpoint: Checkpoint,
    weights: dict[str, torch.Tensor] | None = None,
) -> EagerT:
    """``weights`` as they are, or read from ``checkpoint``."""
    device, parts = torch.device(config.device), layout(spec, shard)

    def store(name: str, weight: torch.Tensor) -> torch.Tensor:
        """A copy: pages of the checkpoint would change when a trainer rewrites it."""
        copied = weight.to(device, dtype, copy=True)
        return _quantised(name, copied) if config.weights == "int4" else copied

    return kind(
        spec,
        shard,
        parts,
        _read_weights(parts, checkpoint, store) if weights is None else weights,
        store=store,
        tables=[table.to(device) for table in _tables(config, directory, spec)],
        cache=cache,
        group=group,
        config=config,
    )


def _read_weights(
    parts: Layout, checkpoint: Checkpoint, store: Callable[[str, torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    weights = {
        name: store(name, assemble(sources, checkpoint.read)) for name, sources in parts.items()
    }
    if (
        parts["head"][0].name == parts["embedding"][0].name
        and weights["head"].shape == weights["embedding"].shape
        and torch.equal(weights["head"], weights["embedding"])
    ):
        weights["head"] = weights["embedding"]  # tied: one storage
    return weights


def _quantised(name: str, weight: torch.Tensor) -> torch.Tensor:
    """The values of a matrix's quantised form; see ``CpuDecoder`` for the head."""
    if name == "head":
        return quant.int8(weight)
    return quant.int4(weight) if weight.dim() == 2 and name != "embedding" else weight


def inverse_frequencies(rotary: RotarySpec, head_dim: int) -> torch.Tensor:
    """fp32 [head_dim / 2], radians per position, by transformers' formulas in fp32."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (rotary.base**exponents)
    if rotary.kind == "default":
        return plain
    slowed = plain / rotary.factor
    if rotary.kind == "linear":
        return slowed
    low, high = rotary.low_frequency_factor, rotary.high_frequency_factor
    turns = rotary.original_context * plain / (2 * torch.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * slowed + blend * plain

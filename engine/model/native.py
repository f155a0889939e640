"""The fast backend: one lean decoder for Llama, Mistral, Qwen, SmolLM and Gemma.

Path: torch_runner.py -> here -> native_ops.py (C++ on CPU) or eager_decoder.py (torch and Triton).
Both hold this rank's share of the weights, by the names of layout.py, and attend over the paged
cache without gathering it.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Protocol

import torch

from engine.config import EngineConfig
from engine.dumps.capture import View
from engine.errors import ConfigError
from engine.model.cuda_graphs import Capture, DecodeGraphs
from engine.model.inputs import Batch
from engine.model.kv_cache import KVCache, LayerShape
from engine.model.layout import Shard, layout
from engine.model.loader import Checkpoint, ModelDirectory
from engine.model.native_build import load_library
from engine.model.native_instrument import NativeInstrument
from engine.model.native_ops import CpuDecoder, covers
from engine.model.sampler import DrawRequest, DrawResult
from engine.model.spec import DecoderSpec, RotarySpec
from engine.model.tapped_decoder import TappedDecoder, decoder_points
from engine.model.target_weights import TargetWeights
from engine.model.targets import Target
from engine.scheduler.ranks import Group
from kernels.rotary import cos_sin_table

AUTO_TOKENS = 64  # of a step; up to here ``auto`` takes int4


class Decoder(Protocol):
    """One rank's decoder over its share of the weights, which ``targets`` bring in."""

    name: str
    weight_form: str
    parameter_bytes: int
    targets: list[Target]
    storages: list[torch.Tensor]  # what the targets write to

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

    def close(self) -> None: ...


class TwoForms:
    """``auto``: small steps are bound by the weights' bytes and run in int4, others in plain.

    Both forms are held, and share the cache. What a token is computed with depends on the load,
    which is why this form is asked for and never the default.
    """

    name = "native"
    weight_form = "auto"

    def __init__(self, few: CpuDecoder, many: CpuDecoder) -> None:
        self._few, self._many = few, many
        self._chosen = few
        self.draw = few.draw
        self.normed = many.normed
        self.targets = few.targets + many.targets
        self.storages = few.storages + many.storages
        self.parameter_bytes = few.parameter_bytes + many.parameter_bytes

    def hidden(self, batch: Batch) -> torch.Tensor:
        self._chosen = self._few if batch.tokens <= AUTO_TOKENS else self._many
        return self._chosen.hidden(batch)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._chosen.logits(x)

    def close(self) -> None:
        self._few.close()
        self._many.close()


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
        self.name = self._decoder.name
        self.draw = self._decoder.draw
        self.weight_form = self._decoder.weight_form
        self.parameter_bytes = self._decoder.parameter_bytes
        self.weights = TargetWeights(self._decoder.targets)
        self.weights.load(Checkpoint(directory.path).read, config.rank_threads)
        self._device = torch.device(config.device)
        self.graphs: DecodeGraphs | None = None
        if config.device == "cuda":
            self.replay_decode_steps(config)
        eager = self._decoder if isinstance(self._decoder, TappedDecoder) else None
        make = partial(_make_eager, config, directory, spec, shard, self._cache, dtype, group)
        self.instrument = NativeInstrument(
            decoder_points(spec, shard.size), eager, make, directory.path,
            form=f"native eager {config.dtype} {config.weights}",
        )  # fmt: skip

    def memory(self, tag: str) -> list[torch.Tensor]:
        """See ``torch_runner.Backend``."""
        if tag == "kv_cache":
            return [*self._cache.keys, *self._cache.values]
        return self._decoder.storages

    def forward(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits fp32 [keep, vocab] and, if wanted, hidden states [tokens, hidden]."""
        if self.graphs is not None and len(keep) == batch.rows == batch.tokens and not want_hidden:
            return self._whole(self.graphs(batch)), None
        batch, keep = self._on_device(batch, keep)
        x = self._decoder.hidden(batch)
        logits = self._decoder.logits(x[keep]) if len(keep) else x.new_empty(0, 0)
        return self._whole(logits), self._decoder.normed(x) if want_hidden else None

    def _on_device(self, batch: Batch, keep: torch.Tensor) -> tuple[Batch, torch.Tensor]:
        if self._device.type == "cpu":
            return batch, keep
        return batch.to(self._device), keep.to(self._device)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """The vocabulary of all ranks."""
        if self._group is None or not len(logits):
            return logits
        return self._group.gather_columns(logits)[:, : self._spec.vocabulary]

    def replay_decode_steps(self, config: EngineConfig, capture: Capture | None = None) -> None:
        """Captures graphs of decode steps, up to as many rows as there are slots."""
        limits = config.limits

        def decode(batch: Batch) -> torch.Tensor:
            on_device = batch.to(self._device)
            return self._decoder.logits(self._decoder.hidden(on_device))

        self.graphs = DecodeGraphs(
            decode,
            largest=limits.max_running,
            max_blocks=limits.kv_tokens // limits.block_tokens,
            block_size=limits.block_tokens,
            device=self._device,
            capture=capture,
        )
        self.graphs.capture()

    def forward_tapped(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool, view: View
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See ``torch_runner.Backend``."""
        logits, normed = self.instrument.decoder.tapped(*self._on_device(batch, keep), view)
        return logits, normed if want_hidden else None

    def close(self) -> None:
        self._decoder.close()


def _make_decoder(
    config: EngineConfig,
    directory: ModelDirectory,
    spec: DecoderSpec,
    shard: Shard,
    cache: KVCache,
    dtype: torch.dtype,
    group: Group | None,
) -> Decoder:
    wants_library = config.device == "cpu" and config.backend != "eager" and covers(spec)
    library = load_library(Path(config.home)) if wants_library else None
    if library is not None:
        forms = ["int4", "plain"] if config.weights == "auto" else [config.weights]
        decoders = [
            CpuDecoder(
                library,
                spec,
                shard,
                layout(spec, shard),
                tables=_tables(config, directory, spec),
                cache=cache,
                group=group,
                dtype=dtype,
                weight_form=form,
                threads=config.rank_threads,
                deterministic=config.deterministic,
            )
            for form in forms
        ]
        return decoders[0] if len(decoders) == 1 else TwoForms(*decoders)
    if config.weights == "auto":
        raise ConfigError("weights auto needs the C++ operators: set it to plain or int4")
    return _make_eager(config, directory, spec, shard, cache, dtype, group)


def _tables(
    config: EngineConfig, directory: ModelDirectory, spec: DecoderSpec
) -> list[torch.Tensor]:
    reach = min(config.limits.max_context or directory.max_context, config.limits.kv_tokens)
    return [cos_sin_table(inverse_frequencies(r, spec.head_dim), reach) for r in spec.rotaries]


def _make_eager(
    config: EngineConfig,
    directory: ModelDirectory,
    spec: DecoderSpec,
    shard: Shard,
    cache: KVCache,
    dtype: torch.dtype,
    group: Group | None,
) -> TappedDecoder:
    """Its weights are zeros until its targets were loaded."""
    return TappedDecoder(
        spec,
        shard,
        layout(spec, shard),
        tables=[table.to(config.device) for table in _tables(config, directory, spec)],
        cache=cache,
        group=group,
        config=config,
        dtype=dtype,
    )


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

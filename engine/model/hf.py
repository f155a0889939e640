"""The broad backend: any causal language model of transformers, with our paged attention.

Path: runner.py -> here. Models call their attention through ``AttentionInterface``; ours writes K
and V to the paged cache and attends over it, so a flat [1, tokens] batch holds prefill chunks,
cached prefixes and decode rows at once. No mask is built: transformers skips masks for an attention
that it has no mask function for. This is the oracle of native.py, so it loops over rows and shares
no arithmetic between them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from engine.dumps.capture import View
from engine.dumps.hooks import hooked, module_points
from engine.dumps.points import DumpPoint
from engine.errors import ConfigError
from engine.model.inputs import Batch
from engine.model.kv_cache import KVCache, LayerShape
from engine.model.loader import Checkpoint, ModelDirectory
from engine.model.sampler import draw_rows
from engine.model.tapped_decoder import show_kv
from engine.model.weights import ModuleWeights

ATTENTION = "quarterdeck_paged"
PROBE_TOKENS = 5
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_STEP = "quarterdeck_step"  # attribute of every attention module: the backend's _Step


@dataclass(slots=True)
class _Step:
    """What the attention function must know; one per model, filled for each forward."""

    layers: dict[int, LayerShape]
    modules: dict[int, nn.Module] = field(default_factory=dict)  # that attend, by layer
    show_kv: Callable[[int], None] | None = None  # while a dump taps the step
    cache: KVCache | None = None
    batch: Batch | None = None
    contexts: list[torch.Tensor] | None = None


class HfBackend:
    """A transformers model on one device. ``parameter_bytes`` counts tied weights once."""

    name = "hf"
    weight_form = "plain"
    draw = staticmethod(draw_rows)

    def __init__(
        self,
        directory: ModelDirectory,
        *,
        dtype: torch.dtype,
        device: torch.device,
        num_blocks: int,
        block_size: int,
    ) -> None:
        self.model, unused = _load(directory, dtype)
        self.model.to(device)
        self._device = device
        self.weights = ModuleWeights(self.model, ignored=unused)
        self._step = _Step(layers={})
        for module in self.model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _STEP, self._step)
        self._probe(directory)
        self.instrument = HfInstrument(self.model, self._step, f"hf eager {NAMES[dtype]}")
        shapes = [self._step.layers[index] for index in sorted(self._step.layers)]
        self._step.cache = KVCache(
            shapes,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=dtype,
            device=device,
        )
        self.parameter_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

    def forward(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [keep, vocab] in the model's dtype, and hidden states [tokens, width] if wanted.

        ``keep``: int64 indices of tokens. Hidden states are those that the output layer reads.
        """
        batch, keep = batch.to(self._device), keep.to(self._device)
        self._step.batch = batch
        self._step.contexts = [batch.context_slots(row) for row in range(batch.rows)]
        output = self.model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            output_hidden_states=want_hidden,
        )
        return output.logits[0], output.hidden_states[-1][0] if want_hidden else None

    def forward_tapped(
        self, batch: Batch, keep: torch.Tensor, want_hidden: bool, view: View
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As ``forward``, with hooks on every module for this one step."""
        step, cache = self._step, self._step.cache
        assert cache is not None

        def show(layer: int) -> None:
            name = self.instrument.attention[layer]
            show_kv(view.tap, name, batch, cache.keys[layer], cache.values[layer], view.rows)

        step.show_kv = show
        try:
            with hooked(self.model, view.tap, view.rows, view.kept):
                return self.forward(batch, keep, want_hidden)
        finally:
            step.show_kv = None

    def memory(self, tag: str) -> list[torch.Tensor]:
        if tag == "weights":
            return list(self.weights.live.values())
        cache = self._step.cache
        assert cache is not None
        return [*cache.keys, *cache.values]

    def close(self) -> None:
        """Nothing is held beyond the process."""

    def _probe(self, directory: ModelDirectory) -> None:
        """One token through the model, to learn the shapes of its cache and refuse what cannot be.

        A layer without this attention (a recurrent one, say) would silently lose its state.
        """
        _run(self.model, 1)
        wanted = int(directory.text.get("num_hidden_layers", len(self._step.layers)))
        if sorted(self._step.layers) != list(range(wanted)):
            raise ConfigError(
                f"{directory.architecture}: {len(self._step.layers)} of {wanted} layers attend "
                "through transformers' attention interface; all must"
            )


class HfInstrument:
    """transformers' own modules are the points; the weights are the live ones.

    ``attention``: the name of the module that attends, by layer.
    """

    is_live = True

    def __init__(self, model: nn.Module, step: _Step, form: str) -> None:
        self.form = form
        names = {module: name for name, module in model.named_modules()}
        self.attention = {layer: names[module] for layer, module in step.modules.items()}
        self._points = [
            _with_kv(point, self.attention.values())
            for point in module_points(model, lambda: _run(model, PROBE_TOKENS))
            if "rotary" not in point.name
        ]

    def points(self) -> list[DumpPoint]:
        return self._points

    def prepare(self, paths: tuple[str, ...]) -> None:
        """Hooks are put on for each step that is tapped."""

    def drop(self) -> None:
        """And taken off behind it."""


def _with_kv(point: DumpPoint, attention: Collection[str]) -> DumpPoint:
    if point.name not in attention:
        return point
    return msgspec.structs.replace(point, shard_dim={**point.shard_dim, "kv": None})


@torch.inference_mode()
def _run(model: nn.Module, tokens: int) -> None:
    """A forward without a cache: nothing attends, shapes are right."""
    model(input_ids=torch.zeros(1, tokens, dtype=torch.int64), use_cache=False)


def _load(directory: ModelDirectory, dtype: torch.dtype) -> tuple[Any, list[str]]:
    """The model, and names in its checkpoint that it has no use for."""
    if directory.text.get("attention_chunk_size"):
        raise ConfigError(f"{directory.architecture}: chunked attention is not supported")
    _ = Checkpoint(directory.path)  # a clear sentence for a missing file
    AttentionInterface.register(ATTENTION, _attend)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    try:
        model, report = load(
            directory.path,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, KeyError) as error:
        raise ConfigError(f"transformers cannot load {directory.path}: {error}") from error
    if report["missing_keys"]:
        names = ", ".join(sorted(report["missing_keys"])[:5])
        raise ConfigError(f"{directory.path} lacks {len(report['missing_keys'])} tensors: {names}")
    for parameter in model.parameters():  # else pages of the file, which a trainer may rewrite
        parameter.data = parameter.data.clone()
    return model.eval(), sorted(report["unexpected_keys"])


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention function: query [1, heads, tokens, width] -> [1, tokens, heads, v].

    transformers passes more (dropout, position ids); what would change the numbers is named here.
    """
    step: _Step = getattr(module, _STEP)
    layer: int = module.layer_idx  # type: ignore[assignment]
    if step.cache is None:
        _check_kind(module, s_aux, position_bias)
        step.modules[layer] = module
        step.layers[layer] = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    assert step.batch is not None and step.contexts is not None
    step.cache.store(layer, step.batch.kv_slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    keys, values = step.cache.keys[layer], step.cache.values[layer]
    if step.show_kv is not None:
        step.show_kv(layer)
    starts = step.batch.query_starts.tolist()
    outputs = [
        attend_row(
            query[0, :, first:last],
            keys[context].transpose(0, 1),
            values[context].transpose(0, 1),
            scaling=query.shape[3] ** -0.5 if scaling is None else scaling,
            sliding_window=sliding_window,
            softcap=softcap,
        )
        for first, last, context in zip(starts, starts[1:], step.contexts, strict=False)
    ]
    return torch.cat(outputs, dim=1).transpose(0, 1)[None], None


def _check_kind(module: nn.Module, *unsupported: torch.Tensor | None) -> None:
    name = type(module).__name__
    if not getattr(module, "is_causal", True):
        raise ConfigError(f"{name} looks at later tokens: only causal models can be served")
    if any(extra is not None for extra in unsupported):
        raise ConfigError(f"{name} uses attention sinks or biases, which are not supported")


def attend_row(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Causal attention of one row's newest tokens over its whole context.

    query [heads, new, width], key and value [kv_heads, context, width], the query's tokens being
    the last of the context. A token sees the last ``sliding_window`` tokens, itself included.
    Returns [heads, new, value width].
    """
    mask = _mask(query.shape[1], key.shape[1], sliding_window, query.device)
    if softcap is None:
        return nn.functional.scaled_dot_product_attention(
            query[None], key[None], value[None], attn_mask=mask, scale=scaling, enable_gqa=True
        )[0]
    groups = query.shape[0] // key.shape[0]
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    scores = softcap * torch.tanh(query @ key.transpose(1, 2) * scaling / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def _mask(
    new: int, context: int, sliding_window: int | None, device: torch.device
) -> torch.Tensor | None:
    """bool [new, context], True where a token is seen; None when all are."""
    windowed = sliding_window is not None and sliding_window < context
    if new == 1 and not windowed:
        return None
    at = torch.arange(context - new, context, device=device)[:, None]
    seen = torch.arange(context, device=device)[None]
    mask = seen <= at
    return mask & (seen > at - sliding_window) if windowed else mask  # type: ignore[operator]

"""What kind of decoder a config.json describes, as plain numbers: the contract of native.py.

Path: torch_runner.py asks ``cover`` whether native.py can run a model; None means hf.py must. Both
spellings of the rotary settings (``rope_theta`` + ``rope_scaling``, ``rope_parameters``) are read.
No torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from engine.errors import ConfigError
from engine.model.loader import ModelDirectory

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3",
}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """``window`` 0: all earlier tokens are seen. ``rotary`` indexes ``DecoderSpec.rotaries``."""

    window: int
    rotary: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RotarySpec:
    """Rotary angles: ``base`` and how long wavelengths are stretched by ``factor``."""

    base: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 1.0
    original_context: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSpec:
    """One decoder. Sizes are of the whole model, not of a tp rank.

    ``norm_offset`` is added to every norm weight (Gemma stores them less one). ``sandwich``: the
    outputs of attention and MLP are normed before they join the residual. Soft caps of 0 are off.
    """

    hidden: int
    layers: tuple[LayerSpec, ...]
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    norm_epsilon: float
    norm_offset: float
    activation: Literal["silu", "gelu_tanh"]
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sandwich: bool
    tied: bool
    embedding_scale: float
    attention_scale: float
    attention_cap: float
    logit_cap: float
    rotaries: tuple[RotarySpec, ...]

    def check_tp(self, size: int) -> None:
        """Raises ConfigError with the valid sizes if the model does not divide over ``size``."""
        valid = [n for n in range(1, self.heads + 1) if self._divides(n)]
        if size not in valid:
            raise ConfigError(
                f"tp {size} does not divide this model ({self.heads} query heads, {self.kv_heads} "
                f"KV heads, MLP width {self.intermediate}); valid sizes: "
                f"{', '.join(map(str, valid))}"
            )

    def _divides(self, size: int) -> bool:
        """KV heads are split, or each is held by ``size / kv_heads`` ranks."""
        if self.heads % size or self.intermediate % size:
            return False
        return self.kv_heads % size == 0 or size % self.kv_heads == 0


def cover(directory: ModelDirectory) -> DecoderSpec | None:
    """The decoder of a directory, or None if native.py does not cover it."""
    family = ARCHITECTURES.get(directory.architecture)
    if family is None:
        return None
    config = _Config(directory.text, family)
    layers, rotary_settings = _layers(config)
    rotaries = [config.rotary(settings) for settings in rotary_settings]
    known = [rotary for rotary in rotaries if rotary is not None]
    if config.get("use_bidirectional_attention", False) or len(known) < len(rotaries):
        return None
    activation = config.activation
    return None if activation is None else _spec(config, activation, layers, tuple(known))


class _Config:
    """A config.json with the defaults of its family, for fields that files may leave out."""

    def __init__(self, values: dict[str, Any], family: str) -> None:
        self._values = values
        self.family = family
        self.gemma = family.startswith("gemma")
        self.heads = int(values["num_attention_heads"])
        self.hidden = int(values["hidden_size"])

    def get(self, name: str, default: Any) -> Any:
        """``default`` also where the file says null."""
        found = self._values.get(name)
        return default if found is None else found

    def cap(self, name: str, default: float) -> float:
        """A soft cap; null turns it off."""
        return float(self._values.get(name, default) or 0.0)

    @property
    def head_dim(self) -> int:
        default = 256 if self.gemma else self.hidden // self.heads
        return int(self.get("head_dim", default))

    @property
    def activation(self) -> Literal["silu", "gelu_tanh"] | None:
        """Gemma 1 files may say ``gelu`` and mean the tanh form."""
        name = self.get("hidden_activation", "gelu_pytorch_tanh" if self.gemma else None)
        name = name or self.get("hidden_act", "silu")
        if name == "silu":
            return "silu"
        return "gelu_tanh" if name in ("gelu_pytorch_tanh", "gelu_new") else None

    def rotary(self, settings: dict[str, Any]) -> RotarySpec | None:
        """None for a kind of scaling that only transformers knows."""
        kind = settings.get("rope_type", settings.get("type", "default"))
        if settings.get("partial_rotary_factor", 1.0) != 1.0:
            return None
        if kind not in ("default", "linear", "llama3"):
            return None
        return RotarySpec(
            base=float(settings.get("rope_theta", 10_000.0)),
            kind=kind,
            factor=float(settings.get("factor", 1.0)),
            low_frequency_factor=float(settings.get("low_freq_factor", 1.0)),
            high_frequency_factor=float(settings.get("high_freq_factor", 1.0)),
            original_context=int(
                settings.get("original_max_position_embeddings")
                or self.get("max_position_embeddings", 0)
            ),
        )


def _layers(config: _Config) -> tuple[tuple[LayerSpec, ...], list[dict[str, Any]]]:
    """The layers, and the settings of the rotaries that they index."""
    kinds = _layer_kinds(config)
    window = int(config.get("sliding_window", 0))
    parameters = config.get("rope_parameters", {})
    if config.family != "gemma3":
        settings = [parameters or _rotary_settings(config)]
        return tuple(LayerSpec(window if k == SLIDING else 0, 0) for k in kinds), settings
    if FULL not in parameters:
        whole = _rotary_settings(config, 1_000_000.0)
        local = {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
        parameters = {FULL: parameters or whole, SLIDING: local}
    layers = tuple(LayerSpec(window, 1) if k == SLIDING else LayerSpec(0, 0) for k in kinds)
    return layers, [parameters[FULL], parameters[SLIDING]]


def _rotary_settings(config: _Config, theta: float = 10_000.0) -> dict[str, Any]:
    return {"rope_theta": config.get("rope_theta", theta), **config.get("rope_scaling", {})}


def _layer_kinds(config: _Config) -> list[str]:
    count = int(config.get("num_hidden_layers", 0))
    if config.family == "mistral":
        return [SLIDING if config.get("sliding_window", 0) else FULL] * count
    if config.family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        return [FULL] * count
    kinds = config.get("layer_types", None)
    if kinds is not None:
        return list(kinds)
    if config.family in ("qwen2", "qwen3"):
        first = config.get("max_window_layers", 28)
        return [SLIDING if i >= first else FULL for i in range(count)]
    if config.family in ("gemma2", "gemma3"):
        pattern = 2 if config.family == "gemma2" else config.get("sliding_window_pattern", 6)
        return [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(count)]
    return [FULL] * count


def _spec(
    config: _Config,
    activation: Literal["silu", "gelu_tanh"],
    layers: tuple[LayerSpec, ...],
    rotaries: tuple[RotarySpec, ...],
) -> DecoderSpec:
    capped = config.family == "gemma2"
    query_scalar = config.head_dim
    if config.family in ("gemma2", "gemma3"):
        query_scalar = config.get("query_pre_attn_scalar", 256)
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderSpec(
        hidden=config.hidden,
        layers=layers,
        heads=config.heads,
        kv_heads=int(config.get("num_key_value_heads", config.heads)),
        head_dim=config.head_dim,
        intermediate=int(config.get("intermediate_size", 0)),
        vocabulary=int(config.get("vocab_size", 0)),
        norm_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        norm_offset=1.0 if config.gemma else 0.0,
        activation=activation,
        qkv_bias=attention_bias or config.family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
        qk_norm=config.family in ("qwen3", "gemma3"),
        sandwich=config.family in ("gemma2", "gemma3"),
        tied=bool(config.get("tie_word_embeddings", config.gemma)),
        embedding_scale=math.sqrt(config.hidden) if config.gemma else 1.0,
        attention_scale=float(query_scalar) ** -0.5,
        attention_cap=config.cap("attn_logit_softcapping", 50.0 if capped else 0.0),
        logit_cap=config.cap("final_logit_softcapping", 30.0 if capped else 0.0),
        rotaries=rotaries,
    )

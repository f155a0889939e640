"""Paged keys and values: one pool per layer, addressed by cache slot.

Path: native.py and hf.py write and read here; scheduler/blocks.py decides which block is whose.
Slot ``block * block_size + offset`` holds the K and V of one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.model.memory import untouched_zeros


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Heads and widths of one layer's cache on this rank; K and V may differ in width."""

    kv_heads: int
    key_width: int
    value_width: int


class KVCache:
    """``keys[layer]`` is [num_blocks * block_size, kv_heads, key_width]; ``values`` likewise.

    The memory is zeroed and taken from the system when it is first written.
    """

    def __init__(
        self,
        layers: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        slots = num_blocks * block_size
        self.block_size = block_size

        def pool(heads: int, width: int) -> torch.Tensor:
            if device.type == "cpu":
                return untouched_zeros((slots, heads, width), dtype)
            return torch.zeros(slots, heads, width, dtype=dtype, device=device)

        self.keys = [pool(shape.kv_heads, shape.key_width) for shape in layers]
        self.values = [pool(shape.kv_heads, shape.value_width) for shape in layers]

    def store(
        self, layer: int, kv_slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Writes [tokens, kv_heads, width] K and V at ``kv_slots`` (int64 [tokens], distinct)."""
        self.keys[layer].index_copy_(0, kv_slots, key)
        self.values[layer].index_copy_(0, kv_slots, value)

"""Scatters new keys and values into the paged cache.

Path: engine/model/native.py, after ``rotary`` and before attention reads the cache. A slot is
block * block_size + offset.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dispatch import LAUNCH_OPTIONS, use_triton

BLOCK = 1024


def store_kv_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """cache[slots[i]] = x[i] for every slot that is not negative."""
    live = slots >= 0
    at = slots[live].long()
    key_cache[at] = key[live]
    value_cache[at] = value[live]


@triton.jit
def _store_kv_kernel(
    key_ptr,
    value_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slot_ptr,
    key_stride,
    value_stride,
    key_cache_stride,
    value_cache_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    key = tl.load(key_ptr + token * key_stride + column, mask=live)
    value = tl.load(value_ptr + token * value_stride + column, mask=live)
    tl.store(key_cache_ptr + slot * key_cache_stride + column, key, mask=live)
    tl.store(value_cache_ptr + slot * value_cache_stride + column, value, mask=live)


def store_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Writes key and value [tokens, kv_heads, dim] to slots of the caches [slots, kv_heads, dim].

    ``slots`` is [tokens] of integers; a token with slot -1 is skipped (padding of a captured
    batch). A slot that is named twice holds one of its writers. Reads and writes
    2 * tokens * kv_heads * dim elements; bound by memory bandwidth.
    """
    _check(key, value, key_cache, value_cache, slots)
    if not use_triton(key):
        store_kv_reference(key, value, key_cache, value_cache, slots)
        return
    width = key.shape[1] * key.shape[2]
    if key.shape[0] == 0:
        return
    block = min(BLOCK, triton.next_power_of_2(width))
    _store_kv_kernel[(key.shape[0], triton.cdiv(width, block))](
        key,
        value,
        key_cache,
        value_cache,
        slots,
        key.stride(0),
        value.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        WIDTH=width,
        BLOCK=block,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


def _check(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    if key.dim() != 3 or key.shape != value.shape:
        raise ValueError(
            "key and value must both be [tokens, kv_heads, dim], got "
            f"{tuple(key.shape)} and {tuple(value.shape)}"
        )
    if key_cache.shape[1:] != key.shape[1:] or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"both caches must be [slots, {key.shape[1]}, {key.shape[2]}], got "
            f"{tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    if len({key.dtype, value.dtype, key_cache.dtype, value_cache.dtype}) > 1:
        raise ValueError(
            f"key, value and caches must have one dtype, got {key.dtype}, {value.dtype}, "
            f"{key_cache.dtype}, {value_cache.dtype}"
        )
    for name, tensor in (
        ("key", key),
        ("value", value),
        ("key_cache", key_cache),
        ("value_cache", value_cache),
    ):
        if tensor.stride(2) != 1 or (tensor.shape[1] > 1 and tensor.stride(1) != tensor.shape[2]):
            raise ValueError(
                f"the heads of {name} must be dense, its strides are {tensor.stride()}"
            )
    if slots.shape != key.shape[:1] or slots.is_floating_point() or not slots.is_contiguous():
        raise ValueError(
            f"slots must be {key.shape[0]} contiguous integers, got {tuple(slots.shape)} "
            f"{slots.dtype}"
        )

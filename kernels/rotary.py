"""Rotary position embedding of queries and keys, in place.

Path: engine/model/native.py, between the qkv projection and ``store_kv``. The layout is that of
GPT-NeoX and Llama: element i of the first half turns with element i of the second half.
Su et al., "RoFormer" (2021).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dispatch import LAUNCH_OPTIONS, use_triton

TILE_ELEMENTS = 1024  # rotated pairs per program


def cos_sin_table(
    inverse_frequencies: torch.Tensor, max_positions: int, scale: float = 1.0
) -> torch.Tensor:
    """[max_positions, rotary_dim] fp32: cosines in the first half, sines in the second.

    ``inverse_frequencies`` is [rotary_dim / 2] in radians per position; ``scale`` is the attention
    factor of scaled variants (YaRN). 128 columns over 131,072 positions take 64 MiB.
    """
    positions = torch.arange(max_positions, dtype=torch.float32, device=inverse_frequencies.device)
    angles = torch.outer(positions, inverse_frequencies.float())
    return torch.cat((angles.cos(), angles.sin()), dim=1) * scale


def rotary_reference(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Turns each pair by its position's angle in fp32, rounded once, written back."""
    half = cos_sin.shape[1] // 2
    rows = cos_sin[positions.long()].float()[:, None, :]
    cos, sin = rows[..., :half], rows[..., half:]
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        x[..., : 2 * half] = turned.to(x.dtype)


@triton.jit
def _rotary_kernel(
    q_ptr,
    k_ptr,
    position_ptr,
    cos_sin_ptr,
    q_heads,
    k_heads,
    q_token_stride,
    q_head_stride,
    k_token_stride,
    k_head_stride,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    q_blocks = tl.cdiv(q_heads, BLOCK_HEADS)
    block = tl.program_id(1)
    if block < q_blocks:
        base = q_ptr + token * q_token_stride
        head_stride = q_head_stride
        heads = q_heads
    else:
        base = k_ptr + token * k_token_stride
        head_stride = k_head_stride
        heads = k_heads
        block -= q_blocks
    head = block * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    column = tl.arange(0, BLOCK_HALF)
    angle = tl.load(position_ptr + token).to(tl.int64) * (2 * HALF) + column
    cos = tl.load(cos_sin_ptr + angle, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(cos_sin_ptr + angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)[None, :]
    live = (head < heads)[:, None] & (column < HALF)[None, :]
    at = head[:, None] * head_stride + column[None, :]
    first = tl.load(base + at, mask=live, other=0.0).to(tl.float32)
    second = tl.load(base + at + HALF, mask=live, other=0.0).to(tl.float32)
    kind = q_ptr.dtype.element_ty
    tl.store(base + at, (first * cos - second * sin).to(kind), mask=live)
    tl.store(base + at + HALF, (second * cos + first * sin).to(kind), mask=live)


def rotary(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    """Turns q [tokens, heads, dim] and k [tokens, kv_heads, dim] in place.

    ``positions`` is [tokens], integers below ``len(cos_sin)``; ``cos_sin`` is
    [positions, rotary_dim] from ``cos_sin_table``. With rotary_dim < dim the rest of each head
    stays as it is. q and k may be views of a fused projection. Reads and writes
    tokens * (heads + kv_heads) * rotary_dim elements; bound by memory bandwidth.
    """
    _check(q, k, positions, cos_sin)
    if not use_triton(q):
        rotary_reference(q, k, positions, cos_sin)
        return
    half = cos_sin.shape[1] // 2
    block_half = triton.next_power_of_2(half)
    most_heads = triton.next_power_of_2(max(q.shape[1], k.shape[1]))
    block_heads = min(most_heads, max(1, TILE_ELEMENTS // block_half))
    blocks = triton.cdiv(q.shape[1], block_heads) + triton.cdiv(k.shape[1], block_heads)
    if q.shape[0] == 0:
        return
    _rotary_kernel[(q.shape[0], blocks)](
        q,
        k,
        positions,
        cos_sin,
        q.shape[1],
        k.shape[1],
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        HALF=half,
        BLOCK_HALF=block_half,
        BLOCK_HEADS=block_heads,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )


def _check(
    q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
) -> None:
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(
            "q and k must be [tokens, heads, dim] with the same tokens and dim, got "
            f"{tuple(q.shape)} and {tuple(k.shape)}"
        )
    if q.dtype != k.dtype:
        raise ValueError(f"q and k must have one dtype, got {q.dtype} and {k.dtype}")
    if q.stride(2) != 1 or k.stride(2) != 1:
        raise ValueError(f"the last axis must be dense, the strides are {q.stride()}, {k.stride()}")
    if positions.shape != q.shape[:1] or positions.is_floating_point():
        raise ValueError(
            f"positions must be {q.shape[0]} integers, got {tuple(positions.shape)} "
            f"{positions.dtype}"
        )
    if cos_sin.dim() != 2 or cos_sin.shape[1] % 2 or cos_sin.shape[1] > q.shape[2]:
        raise ValueError(
            f"cos_sin must be [positions, rotary_dim], rotary_dim even and at most {q.shape[2]}, "
            f"got {tuple(cos_sin.shape)}"
        )
    if not cos_sin.is_contiguous() or not positions.is_contiguous():
        raise ValueError("cos_sin and positions must be contiguous")

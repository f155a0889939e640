"""Root mean square norm, alone or with the residual sum in front of it.

Path: engine/model/native.py (layer norms, final norm, and the per-head norms of Qwen3 and Gemma 3).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dispatch import LAUNCH_OPTIONS, use_triton

MAX_DIM = 16_384  # one row stays in registers; 16,384 fp32 over 16 warps are 32 a thread
TILE_ELEMENTS = 2048  # short rows share a program until it has this many elements


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, weight_offset: float = 0.0
) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) in fp32, rounded once to x's dtype."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    return (wide * scale * (weight.float() + weight_offset)).to(x.dtype)


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """residual += x, then the norm of the *rounded* sum, as if the two ran one after the other."""
    residual.copy_(x.float() + residual.float())
    return rms_norm_reference(residual, weight, eps, weight_offset)


@triton.jit
def _rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    rows,
    heads,
    token_stride,
    head_stride,
    residual_token_stride,
    residual_head_stride,
    eps,
    weight_offset,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    ADD: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_DIM)
    live = (row < rows)[:, None] & (column < DIM)[None, :]
    token = (row // heads).to(tl.int64)
    head = row % heads
    at = (token * token_stride + head * head_stride)[:, None] + column[None, :]
    x = tl.load(x_ptr + at, mask=live, other=0.0).to(tl.float32)
    if ADD:
        at = (token * residual_token_stride + head * residual_head_stride)[:, None] + column[
            None, :
        ]
        total = x + tl.load(residual_ptr + at, mask=live, other=0.0).to(tl.float32)
        rounded = total.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + at, rounded, mask=live)
        x = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / DIM + eps)
    weight = tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32)
    normed = x * scale[:, None] * (weight + weight_offset)[None, :]
    out_at = row.to(tl.int64)[:, None] * DIM + column[None, :]
    tl.store(out_ptr + out_at, normed.to(out_ptr.dtype.element_ty), mask=live)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, weight_offset: float = 0.0
) -> torch.Tensor:
    """Norm over the last axis of x [tokens, dim] or [tokens, heads, dim]; weight [dim].

    ``weight_offset`` is 1 for Gemma, whose weights are stored less one. ``x`` may be a view of a
    fused projection (only its last axis must be dense); the result is contiguous. Reads n and
    writes n elements; bound by memory bandwidth. ValueError if the shapes do not fit.
    """
    _check(x, weight)
    if not use_triton(x):
        return rms_norm_reference(x, weight, eps, weight_offset)
    return _launch(x, None, weight, eps, weight_offset)


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    weight_offset: float = 0.0,
) -> torch.Tensor:
    """residual += x in place, and the norm of the sum; shapes as in ``rms_norm``.

    Reads 2n and writes 2n elements, against 3n and 2n of the two steps apart.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(
            f"x and its residual must be alike: {tuple(x.shape)} {x.dtype} and "
            f"{tuple(residual.shape)} {residual.dtype}"
        )
    if residual.stride(-1) != 1:
        raise ValueError(
            f"the residual's last axis must be dense, its strides are {residual.stride()}"
        )
    if not use_triton(x):
        return add_rms_norm_reference(x, residual, weight, eps, weight_offset)
    return _launch(x, residual, weight, eps, weight_offset)


def _check(x: torch.Tensor, weight: torch.Tensor) -> None:
    if x.dim() not in (2, 3):
        raise ValueError(f"x must be [tokens, dim] or [tokens, heads, dim], got {tuple(x.shape)}")
    if x.stride(-1) != 1:
        raise ValueError(f"the last axis of x must be dense, its strides are {x.stride()}")
    if weight.shape != x.shape[-1:]:
        raise ValueError(
            f"weight must be [{x.shape[-1]}] for x {tuple(x.shape)}, got {tuple(weight.shape)}"
        )
    if x.shape[-1] > MAX_DIM:
        raise ValueError(f"rows of at most {MAX_DIM} elements fit, got {x.shape[-1]}")


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    weight_offset: float,
) -> torch.Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = 1 if x.dim() == 2 else x.shape[1]
    dim = x.shape[-1]
    rows = x.shape[0] * heads
    if rows == 0:
        return out
    added = x if residual is None else residual
    block_dim = triton.next_power_of_2(dim)
    block_rows = max(1, TILE_ELEMENTS // block_dim)
    _rms_norm_kernel[(triton.cdiv(rows, block_rows),)](
        x,
        added,
        weight,
        out,
        rows,
        heads,
        x.stride(0),
        x.stride(-2),
        added.stride(0),
        added.stride(-2),
        eps,
        weight_offset,
        DIM=dim,
        BLOCK_DIM=block_dim,
        BLOCK_ROWS=block_rows,
        ADD=residual is not None,
        num_warps=min(16, max(4, block_dim // 512)),
        **LAUNCH_OPTIONS,
    )
    return out

"""Chunked-prefill attention: flat queries of several sequences against their paged contexts.

Path: engine/model/native.py, after ``store_kv`` has put the chunk's own keys into the cache. Rows
of one token (decode rows of a mixed batch) are chunks of length 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.attention_tile import (
    NO_WINDOW,
    STAGES,
    PagedContext,
    Scores,
    attend,
    attend_reference,
    check_paged,
    gather_context,
    tile_tokens,
)
from kernels.dispatch import LAUNCH_OPTIONS, dot_dtype, use_triton

# Query rows of one program: tokens times the heads that share a kv head. From 128 elements a head
# on, 64 rows take 8 warps: 4 spill on sm_80; 128 rows spill with either (kernels/resources.json).
ROWS = 64
MOST_HEADS = 16  # heads of one kv head in one program; more are spread over programs


def paged_prefill_reference(
    q: torch.Tensor, query_starts: torch.Tensor, context: PagedContext, scores: Scores
) -> torch.Tensor:
    """Causal attention per sequence in fp32, rounded once; rows of no sequence are zeros."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    starts = query_starts.tolist()
    for sequence, length in enumerate(context.lengths.tolist()):
        rows = slice(starts[sequence], starts[sequence + 1])
        count = rows.stop - rows.start
        if count:
            key, value = gather_context(context, sequence, length)
            out[rows] = attend_reference(q[rows], key, value, length - count, scores)
    return out


@triton.jit
def _prefill_kernel(
    q_ptr,
    start_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    scale,
    window,
    kv_heads,
    q_stride,
    q_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    TOKENS: tl.constexpr = ROWS // HEADS
    sequence = tl.program_id(1).to(tl.int64)
    start = tl.load(start_ptr + sequence)
    count = tl.load(start_ptr + sequence + 1) - start
    tile_start = tl.program_id(0) * TOKENS
    if tile_start >= count:
        return
    kv_head = tl.program_id(2) % kv_heads
    row = tl.arange(0, ROWS)
    token = tile_start + row // HEADS
    member = (tl.program_id(2) // kv_heads) * HEADS + row % HEADS
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    live_row = (row < TOKENS * HEADS) & (token < count) & (member < GROUP)
    live = live_row[:, None] & (column < DIM)[None, :]
    at = (start + token).to(tl.int64)
    q_at = at[:, None] * q_stride + head[:, None] * q_head_stride + column[None, :]
    q = tl.load(q_ptr + q_at, mask=live, other=0.0).to(DOT)
    cached = tl.load(length_ptr + sequence) - count
    total, _, weight_sum = attend(
        q,
        key_ptr + kv_head * key_head_stride,
        value_ptr + kv_head * value_head_stride,
        table_ptr + sequence * table_stride,
        cached + token,
        tl.maximum(cached + tile_start - window + 1, 0),
        cached + tl.minimum(tile_start + TOKENS, count),
        scale,
        window,
        key_stride,
        value_stride,
        DIM,
        BLOCK_SIZE,
        SOFT_CAP,
        TILE,
    )
    out = total / tl.where(weight_sum == 0.0, 1.0, weight_sum)[:, None]
    out_at = (at * (kv_heads * GROUP) + head)[:, None] * DIM + column[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live)


def paged_prefill(
    q: torch.Tensor,
    query_starts: torch.Tensor,
    context: PagedContext,
    scores: Scores,
    *,
    longest_chunk: int,
) -> torch.Tensor:
    """Attention of q [tokens, heads, dim]; same shape, contiguous.

    Sequence s owns the rows query_starts[s] : query_starts[s + 1] of q, the last tokens of its
    context; ``query_starts`` is [sequences + 1] int32. ``longest_chunk`` is the largest of these
    counts, known to the host; rows beyond it would be left out. Rows of no sequence are undefined.
    Each query tile reads its visible context once: about
    2 * context * kv_heads * dim * ceil(chunk * group / 64) elements; bound by arithmetic from
    chunks of about 100 tokens. ValueError if the shapes do not fit.
    """
    check_paged(q, context, scores)
    sequences = context.lengths.shape[0]
    if query_starts.shape != (sequences + 1,) or query_starts.dtype != torch.int32:
        raise ValueError(
            f"query_starts must be {sequences + 1} int32, got {tuple(query_starts.shape)} "
            f"{query_starts.dtype}"
        )
    if longest_chunk < 0 or longest_chunk > q.shape[0]:
        raise ValueError(f"longest_chunk {longest_chunk} is not within 0 and {q.shape[0]}")
    if not use_triton(q):
        return paged_prefill_reference(q, query_starts, context, scores)
    return _launch(q, query_starts, context, scores, longest_chunk)


def _launch(
    q: torch.Tensor,
    query_starts: torch.Tensor,
    context: PagedContext,
    scores: Scores,
    longest_chunk: int,
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences, kv_heads = context.lengths.shape[0], context.key.shape[1]
    if sequences == 0 or longest_chunk == 0:
        return out
    group, dim = q.shape[1] // kv_heads, q.shape[2]
    heads = min(group, MOST_HEADS)
    rows = ROWS // 2 if q.dtype == torch.float32 else ROWS
    block_dim = max(16, triton.next_power_of_2(dim))
    grid = (
        triton.cdiv(longest_chunk, rows // heads),
        sequences,
        kv_heads * triton.cdiv(group, heads),
    )
    _prefill_kernel[grid](
        q,
        query_starts,
        context.key,
        context.value,
        context.block_tables,
        context.lengths,
        out,
        scores.scale,
        scores.window or NO_WINDOW,
        kv_heads,
        q.stride(0),
        q.stride(1),
        context.key.stride(0),
        context.key.stride(1),
        context.value.stride(0),
        context.value.stride(1),
        context.block_tables.stride(0),
        GROUP=group,
        HEADS=heads,
        DIM=dim,
        BLOCK_DIM=block_dim,
        BLOCK_SIZE=context.block_size,
        SOFT_CAP=scores.soft_cap,
        ROWS=rows,
        TILE=tile_tokens(block_dim, q.dtype),
        DOT=dot_dtype(q.dtype),
        num_warps=4 if block_dim < 128 else 8,
        num_stages=STAGES,
        **LAUNCH_OPTIONS,
    )
    return out

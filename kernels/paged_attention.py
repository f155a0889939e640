"""Decode attention: one new token per sequence against its paged context.

Path: engine/model/native.py, decode rows. Long contexts are split over programs and put together
by a second kernel (Dao et al., "Flash-Decoding", 2023).
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
from kernels.dispatch import LAUNCH_OPTIONS, dot_dtype, multiprocessors, use_triton

ROWS = 16  # query heads of one kv head in one program; the least a tensor core takes
PROGRAMS_PER_MULTIPROCESSOR = 2
LEAST_SPLIT_TOKENS = 256  # below this the second kernel costs more than the split saves


def paged_attention_reference(
    q: torch.Tensor, context: PagedContext, scores: Scores
) -> torch.Tensor:
    """softmax(mask(cap(q k^T scale))) v in fp32, rounded once; zeros where the length is 0."""
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    for sequence, length in enumerate(context.lengths.tolist()):
        if length:
            key, value = gather_context(context, sequence, length)
            row = slice(sequence, sequence + 1)
            out[row] = attend_reference(q[row], key, value, length - 1, scores)
    return out


@triton.jit
def _decode_kernel(
    q_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    sum_ptr,
    scale,
    window,
    split_tokens,
    kv_heads,
    q_stride,
    q_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    DOT: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) % kv_heads
    split = tl.program_id(2)
    length = tl.load(length_ptr + sequence)
    first = tl.maximum(length - window, 0) + split * split_tokens
    last = tl.minimum(first + split_tokens, length)
    if SPLIT and first >= last:
        return
    member = (tl.program_id(1) // kv_heads) * ROWS + tl.arange(0, ROWS)
    head = kv_head * GROUP + member
    column = tl.arange(0, BLOCK_DIM)
    live = (member < GROUP)[:, None] & (column < DIM)[None, :]
    q_at = sequence * q_stride + head[:, None] * q_head_stride + column[None, :]
    q = tl.load(q_ptr + q_at, mask=live, other=0.0).to(DOT)
    total, top, weight_sum = attend(
        q,
        key_ptr + kv_head * key_head_stride,
        value_ptr + kv_head * value_head_stride,
        table_ptr + sequence * table_stride,
        tl.full([ROWS], 0, dtype=tl.int32) + (length - 1),
        first,
        last,
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
    row = sequence * (kv_heads * GROUP) + head
    if SPLIT:
        row = row * tl.num_programs(2) + split
        tl.store(sum_ptr + row, top + tl.log2(weight_sum), mask=member < GROUP)
    out_at = row[:, None] * DIM + column[None, :]
    tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def _combine_kernel(
    part_ptr,
    sum_ptr,
    length_ptr,
    out_ptr,
    window,
    split_tokens,
    splits,
    DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    row = sequence * tl.num_programs(1) + tl.program_id(1)
    column = tl.arange(0, BLOCK_DIM)
    inside = column < DIM
    live_splits = tl.cdiv(tl.minimum(tl.load(length_ptr + sequence), window), split_tokens)
    total = tl.zeros([BLOCK_DIM], dtype=tl.float32)
    weight_sum = 0.0
    top = -float("inf")
    for split in range(0, live_splits):
        at = row * splits + split
        part = tl.load(part_ptr + at * DIM + column, mask=inside, other=0.0)
        log_sum = tl.load(sum_ptr + at)
        new_top = tl.maximum(top, log_sum)
        weight = tl.exp2(log_sum - new_top)
        decay = tl.exp2(top - new_top)
        total = total * decay + part * weight
        weight_sum = weight_sum * decay + weight
        top = new_top
    out = total / tl.where(weight_sum == 0.0, 1.0, weight_sum)
    tl.store(out_ptr + row * DIM + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def paged_attention(
    q: torch.Tensor,
    context: PagedContext,
    scores: Scores,
    *,
    longest: int | None = None,
    split_tokens: int | None = None,
) -> torch.Tensor:
    """Attention of q [sequences, heads, dim], each at position length - 1; same shape, contiguous.

    ``longest`` is a bound of ``context.lengths`` that the host knows (None: what the tables hold);
    tokens beyond it would be left out. ``split_tokens``: None fits the split to the batch, a number
    makes each row's sums independent of the batch (``QUARTERDECK_DETERMINISTIC``). A sequence of
    length 0 gives zeros. Reads 2 * sum(min(lengths, window)) * kv_heads * dim elements; bound by
    memory bandwidth. ValueError if the shapes do not fit.
    """
    check_paged(q, context, scores)
    if q.shape[0] != context.lengths.shape[0]:
        raise ValueError(f"{q.shape[0]} queries for {context.lengths.shape[0]} sequences")
    if split_tokens is not None and split_tokens < 1:
        raise ValueError(f"split_tokens must be at least 1, got {split_tokens}")
    if not use_triton(q):
        return paged_attention_reference(q, context, scores)
    capacity = context.block_tables.shape[1] * context.block_size
    reach = min(longest or capacity, capacity, scores.window or NO_WINDOW)
    if split_tokens is None:
        programs = q.shape[0] * _groups(q, context)
        split_tokens = choose_split_tokens(programs, reach, multiprocessors(q.device))
    return _launch(q, context, scores, split_tokens, max(1, triton.cdiv(reach, split_tokens)))


def choose_split_tokens(programs: int, longest: int, device_multiprocessors: int) -> int:
    """Tokens per split so that ``programs`` times the splits fill the device about twice.

    ``longest`` is in tokens. A multiple of LEAST_SPLIT_TOKENS, and at least ``longest`` where the
    batch fills the device alone.
    """
    wanted = max(1, device_multiprocessors * PROGRAMS_PER_MULTIPROCESSOR // max(1, programs))
    tokens = triton.cdiv(max(1, longest), wanted)
    return triton.cdiv(tokens, LEAST_SPLIT_TOKENS) * LEAST_SPLIT_TOKENS


def _groups(q: torch.Tensor, context: PagedContext) -> int:
    """Programs per sequence and split."""
    kv_heads = context.key.shape[1]
    return kv_heads * triton.cdiv(q.shape[1] // kv_heads, ROWS)


def _launch(
    q: torch.Tensor, context: PagedContext, scores: Scores, split_tokens: int, splits: int
) -> torch.Tensor:
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    sequences, heads, dim = q.shape
    if sequences == 0:
        return out
    part, sums = out, out
    if splits > 1:
        part = torch.empty((sequences, heads, splits, dim), dtype=torch.float32, device=q.device)
        sums = torch.empty((sequences, heads, splits), dtype=torch.float32, device=q.device)
    block_dim = max(16, triton.next_power_of_2(dim))
    window = scores.window or NO_WINDOW
    _decode_kernel[(sequences, _groups(q, context), splits)](
        q,
        context.key,
        context.value,
        context.block_tables,
        context.lengths,
        part,
        sums,
        scores.scale,
        window,
        split_tokens,
        context.key.shape[1],
        q.stride(0),
        q.stride(1),
        context.key.stride(0),
        context.key.stride(1),
        context.value.stride(0),
        context.value.stride(1),
        context.block_tables.stride(0),
        GROUP=heads // context.key.shape[1],
        DIM=dim,
        BLOCK_DIM=block_dim,
        BLOCK_SIZE=context.block_size,
        SOFT_CAP=scores.soft_cap,
        SPLIT=splits > 1,
        ROWS=ROWS,
        TILE=tile_tokens(block_dim, q.dtype),
        DOT=dot_dtype(q.dtype),
        num_warps=4,
        num_stages=STAGES,
        **LAUNCH_OPTIONS,
    )
    if splits > 1:
        _combine_kernel[(sequences, heads)](
            part,
            sums,
            context.lengths,
            out,
            window,
            split_tokens,
            splits,
            DIM=dim,
            BLOCK_DIM=block_dim,
            num_warps=2,
            **LAUNCH_OPTIONS,
        )
    return out

"""What decode and prefill attention share: the reference, one tile's walk over the paged cache,
and the checks of its arguments.

Path: paged_attention.py, paged_prefill.py -> here. Online softmax after Milakov and Gimelshein
(2018) and Dao et al., "FlashAttention" (2022); in base 2, because exp2 is one instruction.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NO_WINDOW = 2**30  # a window longer than any context
# The address of a key depends on a load from the block table; two stages fetch keys and values one
# tile ahead, the third also takes the table's load out of the loop's way (0 of 32 left in its PTX).
STAGES = 3
LOG2_E = tl.constexpr(1.4426950408889634)


@dataclass(frozen=True, slots=True)
class PagedContext:
    """Keys and values of one layer, and where each sequence's tokens lie in them.

    ``key`` and ``value`` are [slots, kv_heads, dim]. ``block_tables`` is [sequences, max_blocks]
    int32: token t of sequence s is in slot block_tables[s, t // block_size] * block_size +
    t % block_size. ``lengths`` is [sequences] int32: tokens of context, the new ones included;
    0 marks a padded sequence. Entries of a table beyond its length are never read.
    """

    key: torch.Tensor
    value: torch.Tensor
    block_tables: torch.Tensor
    lengths: torch.Tensor
    block_size: int

    def check(self) -> None:
        """ValueError with a sentence if the parts do not fit each other."""
        key, value, tables, lengths = self.key, self.value, self.block_tables, self.lengths
        if key.dim() != 3 or key.shape != value.shape or key.dtype != value.dtype:
            raise ValueError(
                "both caches must be [slots, kv_heads, dim] of one dtype, got "
                f"{tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}"
            )
        if key.stride(2) != 1 or value.stride(2) != 1:
            raise ValueError("the last axis of both caches must be dense")
        if tables.dim() != 2 or lengths.shape != tables.shape[:1]:
            raise ValueError(
                "block_tables must be [sequences, max_blocks] and lengths [sequences], got "
                f"{tuple(tables.shape)} and {tuple(lengths.shape)}"
            )
        if tables.dtype != torch.int32 or lengths.dtype != torch.int32 or tables.stride(1) != 1:
            raise ValueError(
                f"block_tables and lengths must be dense int32, got {tables.dtype} and "
                f"{lengths.dtype}"
            )
        if self.block_size < 1 or key.shape[0] % self.block_size:
            raise ValueError(
                f"{key.shape[0]} slots are not whole blocks of block_size {self.block_size}"
            )


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores are made of q . k: ``scale``, then ``soft_cap``, then the mask.

    ``soft_cap`` c > 0 makes c * tanh(score / c) (Gemma 2). ``window`` w > 0 lets a token see itself
    and the w - 1 tokens before it. 0 turns either off.
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0


def attend_reference(
    q: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first_position: int, scores: Scores
) -> torch.Tensor:
    """Causal attention of q [tokens, heads, dim] over key and value [context, kv_heads, dim].

    Query i is at ``first_position`` + i. All in fp32, rounded once to q's dtype.
    """
    group = q.shape[1] // key.shape[1]
    wide_key = key.float().repeat_interleave(group, dim=1)
    wide_value = value.float().repeat_interleave(group, dim=1)
    weights = torch.einsum("qhd,khd->hqk", q.float(), wide_key) * scores.scale
    if scores.soft_cap:
        weights = scores.soft_cap * torch.tanh(weights / scores.soft_cap)
    at_query = torch.arange(q.shape[0], device=q.device)[:, None] + first_position
    at_key = torch.arange(key.shape[0], device=q.device)[None, :]
    visible = at_key <= at_query
    if scores.window:
        visible &= at_key > at_query - scores.window
    weights = weights.masked_fill(~visible, float("-inf")).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide_value).to(q.dtype)


def gather_context(
    context: PagedContext, sequence: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [length, kv_heads, dim] of one sequence, copied out of the cache."""
    tokens = torch.arange(length, device=context.key.device)
    blocks = context.block_tables[sequence, tokens // context.block_size].long()
    slots = blocks * context.block_size + tokens % context.block_size
    return context.key[slots], context.value[slots]


@triton.jit
def attend(
    q,
    key_ptr,
    value_ptr,
    table_ptr,
    at_query,
    first,
    last,
    scale,
    window,
    key_stride,
    value_stride,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Walks tokens [first, last) of one sequence and one kv head in tiles of TILE.

    q [ROWS, BLOCK_DIM] is in the dtype of the products; ``at_query`` [ROWS] are the positions of
    its rows. Returns (sum of weighted values [ROWS, BLOCK_DIM], largest score [ROWS] in base 2,
    sum of weights [ROWS]) in fp32. A row that sees nothing has a sum of 0.
    """
    column = tl.arange(0, q.shape[1])
    inside = column < DIM
    total = tl.zeros([q.shape[0], q.shape[1]], dtype=tl.float32)
    top = tl.full([q.shape[0]], float("-inf"), dtype=tl.float32)
    weight_sum = tl.zeros([q.shape[0]], dtype=tl.float32)
    for start in range(first, last, TILE):
        token = start + tl.arange(0, TILE)
        live = token < last
        block = tl.load(table_ptr + token // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + token % BLOCK_SIZE
        key_at = slot[None, :] * key_stride + column[:, None]
        key = tl.load(key_ptr + key_at, mask=live[None, :] & inside[:, None], other=0.0)
        score = tl.dot(q, key.to(q.dtype), input_precision="ieee") * scale
        if SOFT_CAP > 0.0:
            # tanh(z) is 2 sigmoid(2 z) - 1
            score = SOFT_CAP * (2.0 * tl.sigmoid(2.0 * (score / SOFT_CAP)) - 1.0)
        distance = at_query[:, None] - token[None, :]
        visible = live[None, :] & (distance >= 0) & (distance < window)
        score = tl.where(visible, score * LOG2_E, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, axis=1))
        # a row that has seen nothing yet has no largest score to subtract
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - shift[:, None])
        decay = tl.exp2(top - shift)
        value_at = slot[:, None] * value_stride + column[None, :]
        value = tl.load(value_ptr + value_at, mask=live[:, None] & inside[None, :], other=0.0)
        total = total * decay[:, None]
        total += tl.dot(weight.to(q.dtype), value.to(q.dtype), input_precision="ieee")
        weight_sum = weight_sum * decay + tl.sum(weight, axis=1)
        top = new_top
    return total, top, weight_sum


def tile_tokens(block_dim: int, dtype: torch.dtype) -> int:
    """Context tokens of one tile.

    At 256 elements a head 64 would not fit 100 KiB of shared memory; fp32 has no tensor cores at
    full precision, and its products spill with larger tiles.
    """
    if dtype == torch.float32:
        return 32 if block_dim <= 64 else 16
    return 64 if block_dim <= 128 else 32


def check_paged(q: torch.Tensor, context: PagedContext, scores: Scores) -> None:
    """ValueError with a sentence if q [tokens, heads, dim], context and scores do not fit."""
    context.check()
    kv_heads, dim = context.key.shape[1:]
    if q.dim() != 3 or q.stride(2) != 1:
        raise ValueError(
            f"q must be [tokens, heads, dim] with a dense last axis, got {tuple(q.shape)} with "
            f"strides {q.stride()}"
        )
    if q.shape[2] != dim or q.shape[1] % kv_heads:
        raise ValueError(
            f"{q.shape[1]} query heads of {q.shape[2]} do not fit {kv_heads} kv heads of {dim}"
        )
    if q.dtype != context.key.dtype:
        raise ValueError(f"q and caches must have one dtype, got {q.dtype}, {context.key.dtype}")
    if scores.window < 0 or scores.soft_cap < 0:
        raise ValueError(
            f"window and soft_cap must not be negative, got {scores.window} and {scores.soft_cap}"
        )

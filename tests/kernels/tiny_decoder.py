"""A two-layer Llama of random weights, made of this repository's kernels alone.

For tests of what runs a forward (CUDA graphs) and of the kernels together.
"""

from __future__ import annotations

import torch

from engine.model.inputs import Batch
from kernels.attention_tile import PagedContext, Scores
from kernels.gated_activation import silu_and_mul
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import cos_sin_table, rotary
from kernels.store_kv import store_kv
from tests.kernels.inputs import normal

LAYERS, HIDDEN, HEADS, KV_HEADS, DIM, WIDTH, VOCABULARY = 2, 64, 4, 2, 16, 96, 97
EPS = 1e-6


class TinyDecoder:
    """``cache`` is [layers, 2, slots, kv_heads, dim]; a forward returns logits of every token."""

    def __init__(self, *, slots: int, dtype: torch.dtype, device: str) -> None:
        def weight(rows: int, columns: int, seed: int) -> torch.Tensor:
            return normal(rows, columns, dtype=dtype, seed=seed, device=device) * columns**-0.5

        def layer(seed: int) -> tuple[torch.Tensor, ...]:
            return (
                weight((HEADS + 2 * KV_HEADS) * DIM, HIDDEN, seed),
                weight(HIDDEN, HEADS * DIM, seed + 1),
                weight(2 * WIDTH, HIDDEN, seed + 2),
                weight(HIDDEN, WIDTH, seed + 3),
            )

        self.layers = [layer(10 * index) for index in range(LAYERS)]
        self.embedding = normal(VOCABULARY, HIDDEN, dtype=dtype, seed=99, device=device)
        self.norm = torch.ones(HIDDEN, dtype=dtype, device=device)
        steps = torch.arange(0, DIM, 2, dtype=torch.float32, device=device) / DIM
        self.cos_sin = cos_sin_table(10_000.0**-steps, 256)
        self.cache = torch.zeros((LAYERS, 2, slots, KV_HEADS, DIM), dtype=dtype, device=device)

    def __call__(self, batch: Batch) -> torch.Tensor:
        residual = self.embedding[batch.token_ids]
        x = rms_norm(residual, self.norm, EPS)
        for index, (qkv, out, gate_up, down) in enumerate(self.layers):
            x = self._attend(index, x @ qkv.T, batch) @ out.T
            x = add_rms_norm(x, residual, self.norm, EPS)
            x = silu_and_mul(*(x @ gate_up.T).chunk(2, dim=1)) @ down.T
            x = add_rms_norm(x, residual, self.norm, EPS)
        return x @ self.embedding.T

    def _attend(self, layer: int, qkv: torch.Tensor, batch: Batch) -> torch.Tensor:
        heads = qkv.view(-1, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        rotary(q, k, batch.positions, self.cos_sin)
        key, value = self.cache[layer]
        store_kv(k, v, key, value, batch.kv_slots)
        context = PagedContext(
            key, value, batch.block_tables, batch.context_lengths, batch.block_size
        )
        scores = Scores(DIM**-0.5)
        if batch.tokens == batch.rows:
            out = paged_attention(q, context, scores)
        else:
            starts = batch.query_starts
            out = paged_prefill(q, starts, context, scores, longest_chunk=batch.tokens)
        return out.flatten(1)


def batch_of(
    chunks: list[list[int]], starts: list[int], tables: list[list[int]], *, block_size: int
) -> Batch:
    """Rows of new token ids behind ``starts`` cached tokens, with each row's blocks."""
    counts = [len(chunk) for chunk in chunks]
    positions = [
        start + offset
        for start, count in zip(starts, counts, strict=True)
        for offset in range(count)
    ]
    rows = [row for row, count in enumerate(counts) for _ in range(count)]
    width = max(map(len, tables))
    return Batch(
        token_ids=torch.tensor([token for chunk in chunks for token in chunk]),
        positions=torch.tensor(positions),
        kv_slots=torch.tensor(
            [
                tables[row][position // block_size] * block_size + position % block_size
                for row, position in zip(rows, positions, strict=True)
            ]
        ),
        query_starts=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_lengths=torch.tensor(
            [start + count for start, count in zip(starts, counts, strict=True)], dtype=torch.int32
        ),
        block_tables=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        block_size=block_size,
    )

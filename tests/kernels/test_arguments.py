"""Arguments that do not fit are refused with a sentence, on every device alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kernels.attention_tile import PagedContext, Scores
from kernels.gated_activation import gelu_tanh_and_mul, silu_and_mul
from kernels.paged_attention import paged_attention
from kernels.paged_prefill import paged_prefill
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.sample import sample
from kernels.store_kv import store_kv

X = torch.zeros(2, 8)
HEADS = torch.zeros(2, 4, 8)
POSITIONS = torch.zeros(2, dtype=torch.int32)
CACHE = PagedContext(
    key=torch.zeros(32, 2, 8),
    value=torch.zeros(32, 2, 8),
    block_tables=torch.zeros((2, 2), dtype=torch.int32),
    lengths=torch.ones(2, dtype=torch.int32),
    block_size=16,
)
STARTS = torch.tensor([0, 1, 2], dtype=torch.int32)
PLAIN = Scores(0.5)


def decode(q: torch.Tensor = HEADS, scores: Scores = PLAIN, **changes: object) -> torch.Tensor:
    return paged_attention(q, replace(CACHE, **changes), scores)  # type: ignore[arg-type]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "rms_norm of one axis": (lambda: rms_norm(X[0], X[0], 1e-6), r"x must be \[tokens, dim\]"),
    "rms_norm of columns": (lambda: rms_norm(X.T, X[:, 0], 1e-6), "last axis of x must be dense"),
    "rms_norm with a short weight": (lambda: rms_norm(X, X[0, :7], 1e-6), r"weight must be \[8\]"),
    "rms_norm of a long row": (
        lambda: rms_norm(torch.zeros(1, 16_385), torch.zeros(16_385), 1e-6),
        "at most 16384 elements",
    ),
    "add_rms_norm of two dtypes": (
        lambda: add_rms_norm(X, X.half(), X[0], 1e-6),
        "x and its residual must be alike",
    ),
    "add_rms_norm of columns": (
        lambda: add_rms_norm(X, torch.zeros(8, 2).T, X[0], 1e-6),
        "residual's last axis must be dense",
    ),
    "silu of two shapes": (lambda: silu_and_mul(X, X[:1]), "gate and up must both be"),
    "gelu of two dtypes": (lambda: gelu_tanh_and_mul(X, X.half()), "must have one dtype"),
    "silu of columns": (lambda: silu_and_mul(X.T, X.T), "last axis must be dense"),
    "rotary of two lengths": (
        lambda: rotary(HEADS, HEADS[:1], POSITIONS, X),
        "same tokens and dim",
    ),
    "rotary of two dtypes": (
        lambda: rotary(HEADS, HEADS.half(), POSITIONS, X),
        "q and k must have one dtype",
    ),
    "rotary with too few positions": (
        lambda: rotary(HEADS, HEADS, POSITIONS[:1], X),
        "positions must be 2 integers",
    ),
    "rotary with an odd table": (
        lambda: rotary(HEADS, HEADS, POSITIONS, X[:, :7]),
        "rotary_dim even and at most 8",
    ),
    "rotary with a cut table": (
        lambda: rotary(HEADS, HEADS, POSITIONS, X[:, :4]),
        "must be contiguous",
    ),
    "rotary of columns": (
        lambda: rotary(HEADS.transpose(1, 2), HEADS.transpose(1, 2), POSITIONS, X[:, :4]),
        "last axis must be dense",
    ),
    "store_kv of two shapes": (
        lambda: store_kv(HEADS, HEADS[:, :1], CACHE.key, CACHE.value, POSITIONS),
        "key and value must both be",
    ),
    "store_kv into other heads": (
        lambda: store_kv(HEADS, HEADS, CACHE.key, CACHE.value, POSITIONS),
        r"both caches must be \[slots, 4, 8\]",
    ),
    "store_kv into another dtype": (
        lambda: store_kv(HEADS[:, :2], HEADS[:, :2], CACHE.key.half(), CACHE.value, POSITIONS),
        "must have one dtype",
    ),
    "store_kv of spread heads": (
        lambda: store_kv(HEADS[:, ::2], HEADS[:, ::2], CACHE.key, CACHE.value, POSITIONS),
        "heads of key must be dense",
    ),
    "store_kv with too few slots": (
        lambda: store_kv(HEADS[:, :2], HEADS[:, :2], CACHE.key, CACHE.value, POSITIONS[:1]),
        "slots must be 2 contiguous integers",
    ),
    "attention of one axis too few": (lambda: decode(X), r"q must be \[tokens, heads, dim\]"),
    "attention with two cache shapes": (
        lambda: decode(value=CACHE.value[:16]),
        "both caches must be",
    ),
    "attention with spread caches": (
        lambda: decode(
            key=CACHE.key.transpose(1, 2).contiguous().transpose(1, 2),
        ),
        "last axis of both caches must be dense",
    ),
    "attention with heads that do not divide": (
        lambda: decode(HEADS[:, :3]),
        "3 query heads of 8 do not fit 2 kv heads of 8",
    ),
    "attention of two dtypes": (lambda: decode(HEADS.half()), "q and caches must have one dtype"),
    "attention with too few lengths": (
        lambda: decode(lengths=CACHE.lengths[:1]),
        r"lengths \[sequences\]",
    ),
    "attention with long tables": (
        lambda: decode(block_tables=CACHE.block_tables.long()),
        "must be dense int32",
    ),
    "attention with a cut block": (lambda: decode(block_size=15), "not whole blocks of block_size"),
    "attention with a negative window": (
        lambda: decode(scores=Scores(0.5, window=-1)),
        "must not be negative",
    ),
    "decode with too few queries": (lambda: decode(HEADS[:1]), "1 queries for 2 sequences"),
    "decode with an empty split": (
        lambda: paged_attention(HEADS, CACHE, PLAIN, split_tokens=0),
        "split_tokens must be at least 1",
    ),
    "prefill with too few starts": (
        lambda: paged_prefill(HEADS, STARTS[:2], CACHE, PLAIN, longest_chunk=1),
        "query_starts must be 3 int32",
    ),
    "prefill with a chunk beyond its queries": (
        lambda: paged_prefill(HEADS, STARTS, CACHE, PLAIN, longest_chunk=3),
        "longest_chunk 3 is not within 0 and 2",
    ),
    "sample of one axis": (
        lambda: sample(X[0], X[0], X[0]),
        r"logits must be \[rows, vocabulary\]",
    ),
    "sample of an empty vocabulary": (
        lambda: sample(X[:, :0], X[:, 0], X[:, 0]),
        "logits must be",
    ),
    "sample with too few temperatures": (
        lambda: sample(X, X[:1, 0], X[:, 0]),
        "temperature must be 2 fp32 values",
    ),
    "sample with half a uniform": (
        lambda: sample(X, X[:, 0], X[:, 0].half()),
        "uniform must be 2 fp32 values",
    ),
    "sample of too many logits": (
        lambda: sample(torch.empty((1, 2**24 + 1), device="meta"), X[0, :1], X[0, :1]),
        "at most 16777216 logits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused(name: str):
    call, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        call()

"""paged_attention and paged_prefill against their references, and against each other."""

from __future__ import annotations

import pytest
import torch

from kernels.attention_tile import Scores
from kernels.paged_attention import paged_attention, paged_attention_reference
from kernels.paged_prefill import paged_prefill, paged_prefill_reference
from tests.kernels.inputs import DTYPES, assert_close, normal, paged_context

SCORES = {
    "plain": Scores(0.125),
    "window": Scores(0.125, window=37),
    "cap": Scores(0.5, soft_cap=3.0),
    "window and cap": Scores(0.5, window=5, soft_cap=3.0),
}
SHAPES = [(9, 3, 64), (4, 4, 40), (20, 1, 16), (2, 1, 256)]  # heads, kv heads, dim
CASES = [
    pytest.param(shape, scores, dtype, id=f"{shape}-{name}-{dtype}")
    for shape in SHAPES
    for name, scores in SCORES.items()
    for dtype in DTYPES
    # bf16 with every head size, fp16 with one: the interpreter's conversions are slow
    if dtype == torch.float32
    or (name == "window and cap" and (dtype == torch.bfloat16 or shape == SHAPES[0]))
]


@pytest.mark.parametrize(("shape", "scores", "dtype"), CASES)
def test_decode_agrees(shape: tuple[int, int, int], scores: Scores, dtype: torch.dtype):
    heads, kv_heads, dim = shape
    cache = paged_context([1, 0, 70, 64], kv_heads=kv_heads, dim=dim, dtype=dtype)
    q = normal(4, heads, dim, dtype=dtype)
    expected = paged_attention_reference(q, cache, scores)
    assert_close(paged_attention(q, cache, scores), expected)


@pytest.mark.parametrize(
    "scores", [*SCORES.values(), Scores(0.125, window=64)], ids=[*SCORES, "window of two splits"]
)
@pytest.mark.parametrize(
    ("split_tokens", "dtype"), [(32, torch.float32), (50, torch.float32), (32, torch.bfloat16)]
)
def test_split_decode_agrees(split_tokens: int, scores: Scores, dtype: torch.dtype):
    cache = paged_context([1, 0, 101, 64], kv_heads=1, dim=24, dtype=dtype, block_size=8)
    q = normal(4, 3, 24, dtype=dtype)
    expected = paged_attention_reference(q, cache, scores)
    assert_close(paged_attention(q, cache, scores, split_tokens=split_tokens), expected)


def test_a_long_context_is_split_by_itself_and_agrees():
    cache = paged_context([600], kv_heads=1, dim=16, dtype=torch.float32)
    q = normal(1, 3, 16, dtype=torch.float32)
    expected = paged_attention_reference(q, cache, SCORES["plain"])
    assert_close(paged_attention(q, cache, SCORES["plain"]), expected)


@pytest.mark.parametrize("split_tokens", [32, 1024])
def test_with_a_given_split_a_row_is_the_same_in_every_batch(split_tokens: int):
    cache = paged_context([90, 3, 47], kv_heads=2, dim=32, dtype=torch.bfloat16)
    q = normal(3, 4, 32, dtype=torch.bfloat16)
    scores = SCORES["plain"]
    together = paged_attention(q, cache, scores, split_tokens=split_tokens)
    for row in range(3):
        rows = slice(row, row + 1)
        alone = type(cache)(
            cache.key, cache.value, cache.block_tables[rows], cache.lengths[rows], cache.block_size
        )
        out = paged_attention(q[rows], alone, scores, split_tokens=split_tokens)
        assert torch.equal(out, together[rows])


@pytest.mark.parametrize(("shape", "scores", "dtype"), CASES)
def test_prefill_agrees_on_whole_prompts_chunks_and_single_tokens(
    shape: tuple[int, int, int], scores: Scores, dtype: torch.dtype
):
    heads, kv_heads, dim = shape
    # a whole prompt, the last 3 of 50, nothing, one decode row
    chunks, lengths = [21, 3, 0, 1], [21, 50, 7, 33]
    cache = paged_context(lengths, kv_heads=kv_heads, dim=dim, dtype=dtype)
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    q = normal(sum(chunks), heads, dim, dtype=dtype)
    out = paged_prefill(q, starts, cache, scores, longest_chunk=max(chunks))
    assert_close(out, paged_prefill_reference(q, starts, cache, scores))


def test_decode_and_a_prefill_of_one_token_give_the_same():
    cache = paged_context([65, 12], kv_heads=3, dim=64, dtype=torch.float32)
    q = normal(2, 9, 64, dtype=torch.float32)
    starts = torch.arange(3, dtype=torch.int32)
    scores = SCORES["window"]
    prefill = paged_prefill(q, starts, cache, scores, longest_chunk=1)
    assert_close(paged_attention(q, cache, scores), prefill)


def test_q_may_be_a_view_of_a_fused_projection():
    cache = paged_context([9, 20], kv_heads=2, dim=16, dtype=torch.float32)
    q = normal(2, 8, 16, dtype=torch.float32)[:, 1:5]
    starts = torch.arange(3, dtype=torch.int32)
    scores = SCORES["plain"]
    expected = paged_attention_reference(q, cache, scores)
    assert_close(paged_attention(q, cache, scores), expected)
    assert_close(paged_prefill(q, starts, cache, scores, longest_chunk=1), expected)

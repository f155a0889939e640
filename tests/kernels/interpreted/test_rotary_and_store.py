"""rotary and store_kv against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.rotary import cos_sin_table, rotary, rotary_reference
from kernels.store_kv import store_kv, store_kv_reference
from tests.kernels.inputs import DTYPES, assert_close, normal


def table(rotary_dim: int) -> torch.Tensor:
    steps = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return cos_sin_table(10_000.0**-steps, 97)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [(9, 3, 64, 64), (5, 1, 40, 20), (20, 2, 256, 256), (1, 1, 6, 2)],
)
def test_rotary_turns_views_of_one_projection_in_place(
    heads: int, kv_heads: int, dim: int, rotary_dim: int, dtype: torch.dtype
):
    qkv = normal(3, (heads + kv_heads) * dim, dtype=dtype)
    expected = qkv.clone()
    positions = torch.tensor([96, 0, 41], dtype=torch.int32)
    for tensor, turn in ((qkv, rotary), (expected, rotary_reference)):
        q, k = tensor.view(3, heads + kv_heads, dim).split((heads, kv_heads), dim=1)
        turn(q, k, positions, table(rotary_dim))
    assert_close(qkv, expected)
    untouched = expected.view(3, heads + kv_heads, dim)[..., rotary_dim:]
    assert torch.equal(qkv.view(3, heads + kv_heads, dim)[..., rotary_dim:], untouched)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kv_heads", "dim"), [(3, 64), (1, 40), (9, 130)])
def test_store_kv_writes_the_named_slots_and_nothing_else(
    kv_heads: int, dim: int, dtype: torch.dtype
):
    kv = normal(5, 2 * kv_heads * dim, dtype=dtype)
    key, value = (half.view(5, kv_heads, dim) for half in kv.chunk(2, dim=1))
    slots = torch.tensor([17, -1, 0, 31, -1])
    caches = [normal(32, kv_heads, dim, dtype=dtype, seed=seed) for seed in (3, 4)]
    expected = [cache.clone() for cache in caches]
    store_kv(key, value, *caches, slots)
    store_kv_reference(key, value, *expected, slots)
    assert torch.equal(caches[0], expected[0])
    assert torch.equal(caches[1], expected[1])

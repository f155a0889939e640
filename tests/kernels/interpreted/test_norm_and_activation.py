"""rms_norm, add_rms_norm, silu_and_mul and gelu_tanh_and_mul against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.gated_activation import (
    gelu_tanh_and_mul,
    gelu_tanh_and_mul_reference,
    silu_and_mul,
    silu_and_mul_reference,
)
from kernels.rms_norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference
from tests.kernels.inputs import DTYPES, assert_close, normal

EPS = 1e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 576), (7, 100), (2, 4097), (130, 33)], ids=str)
def test_rms_norm_agrees_on_odd_shapes(shape: tuple[int, int], dtype: torch.dtype):
    x, weight = normal(*shape, dtype=dtype), normal(shape[1], dtype=dtype, seed=1)
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_reads_the_heads_of_a_fused_projection_in_place(dtype: torch.dtype):
    qkv = normal(5, 9 * 24, dtype=dtype)
    heads = qkv[:, 48:].view(5, 7, 24)
    weight = normal(24, dtype=torch.float32)
    out = rms_norm(heads, weight, EPS, weight_offset=1.0)
    assert out.is_contiguous()
    assert_close(out, rms_norm_reference(heads, weight, EPS, 1.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_add_rms_norm_updates_the_residual_and_norms_the_rounded_sum(
    offset: float, dtype: torch.dtype
):
    x, weight = normal(6, 333, dtype=dtype), normal(333, dtype=dtype, seed=1)
    residual = normal(6, 400, dtype=dtype, seed=2)[:, :333]
    expected_residual = residual.clone()
    out = add_rms_norm(x, residual, weight, EPS, weight_offset=offset)
    expected = add_rms_norm_reference(x, expected_residual, weight, EPS, offset)
    assert_close(residual, expected_residual)
    # the sum is off by one rounding, its norm follows, the result is rounded again
    assert_close(out, expected, roundings=3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 1536), (2, 1025)], ids=str)
def test_the_gated_activations_agree_on_halves_of_one_projection(
    shape: tuple[int, int], dtype: torch.dtype
):
    rows, width = shape
    gate, up = (normal(rows, 2 * width, dtype=dtype) * 4).chunk(2, dim=1)
    assert_close(silu_and_mul(gate, up), silu_and_mul_reference(gate, up))
    assert_close(gelu_tanh_and_mul(gate, up), gelu_tanh_and_mul_reference(gate, up))


def test_no_rows_give_no_rows():
    none = torch.empty((0, 64))
    assert rms_norm(none, torch.ones(64), EPS).shape == (0, 64)
    assert silu_and_mul(none, none).shape == (0, 64)

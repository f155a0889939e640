"""The choice between Triton and the references."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import triton.language as tl

from kernels import dispatch
from kernels.paged_attention import LEAST_SPLIT_TOKENS, choose_split_tokens
from kernels.rms_norm import rms_norm, rms_norm_reference

KERNELS = Path(dispatch.__file__).parent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_cuda_tensor_takes_triton_and_a_cpu_tensor_the_reference(dtype: torch.dtype):
    assert dispatch.choose("cuda", dtype, interpreted=False) == "triton"
    assert dispatch.choose("cpu", dtype, interpreted=False) == "reference"


def test_under_the_interpreter_a_cpu_tensor_takes_triton():
    assert dispatch.choose("cpu", torch.bfloat16, interpreted=True) == "triton"


@pytest.mark.parametrize("dtype", [torch.float64, torch.int8], ids=str)
def test_a_dtype_without_a_kernel_takes_the_reference_everywhere(dtype: torch.dtype):
    assert dispatch.choose("cuda", dtype, interpreted=False) == "reference"
    assert dispatch.choose("cpu", dtype, interpreted=True) == "reference"


def test_other_devices_take_the_reference():
    assert dispatch.choose("mps", torch.float32, interpreted=False) == "reference"


def test_forcing_an_implementation_ends_with_its_block_even_after_an_error():
    tensor = torch.ones(1)
    before = dispatch.use_triton(tensor)
    with pytest.raises(KeyError), dispatch.forced("triton"):
        assert dispatch.use_triton(tensor)
        with dispatch.forced("reference"):
            assert not dispatch.use_triton(tensor)
        assert dispatch.use_triton(tensor)
        raise KeyError
    assert dispatch.use_triton(tensor) == before


def test_an_operator_on_the_cpu_answers_with_its_reference():
    x, weight = torch.randn(3, 8), torch.randn(8)
    with dispatch.forced("reference"):
        assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))


def test_products_of_fp32_stay_fp32():
    assert dispatch.dot_dtype(torch.float32) == tl.float32


def test_only_dispatch_asks_where_it_runs():
    """No environment lookup and no choice by device in any other file of kernels/."""
    for path in KERNELS.glob("*.py"):
        if path.name == "dispatch.py":
            continue
        names = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert not names & {"environ", "getenv", "is_cuda", "is_available", "interpret"}, path


def test_a_short_context_or_a_full_batch_is_not_split():
    assert choose_split_tokens(1, LEAST_SPLIT_TOKENS, 132) >= LEAST_SPLIT_TOKENS
    assert choose_split_tokens(512, 32_768, 132) >= 32_768


def test_one_long_context_is_split_over_the_whole_device():
    # 8 programs on 132 multiprocessors: 33 parts of 4,096 tokens make two programs each
    assert choose_split_tokens(8, 131_072, 132) == 4096

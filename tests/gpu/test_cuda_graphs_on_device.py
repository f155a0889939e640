"""Decode graphs on a CUDA device: a replayed step gives what an eager one gives."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernel_check import check_graphs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_replayed_decode_steps_agree_with_eager_ones(dtype: torch.dtype):
    outcome = check_graphs(dtype)
    assert outcome.right, outcome

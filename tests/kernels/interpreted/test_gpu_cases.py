"""The cases of tests/gpu/check, in their small form."""

from __future__ import annotations

import torch

from tests.gpu.cases import SMALL, cases
from tests.gpu.kernel_check import largest_error
from tests.kernels.inputs import TOLERANCE


def test_the_gpu_check_would_find_every_kernel_right():
    for case in cases(SMALL, torch.bfloat16):
        error = largest_error(case.run(*case.copies()), case.reference(*case.copies()))
        assert error <= TOLERANCE[torch.bfloat16] * case.roundings, case.name
        assert case.bytes_moved > 0


def test_a_wrong_token_is_an_infinite_error():
    assert largest_error((torch.tensor([1]),), (torch.tensor([2]),)) == float("inf")

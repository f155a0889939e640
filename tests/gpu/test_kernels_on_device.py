"""Every kernel on a CUDA device: right, and the same when replayed from a graph."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.cases import Place, cases
from tests.gpu.kernel_check import DTYPES, check

pytestmark = pytest.mark.gpu
PLACE = Place("cuda", tokens=130, context=300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_kernel_agrees_with_its_reference_and_replays_from_a_graph(dtype: torch.dtype):
    outcomes = [check(case, dtype, timed=False) for case in cases(PLACE, dtype)]
    wrong = [outcome for outcome in outcomes if not outcome.right]
    assert not wrong, wrong

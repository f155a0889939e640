"""Which implementation an operator runs: the one place that decides.

Path: launcher of an operator -> here. Triton needs a CUDA device, or its interpreter, which reads
``TRITON_INTERPRET`` once, when ``@triton.jit`` decorates; the same value is read here, at the same
time, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Final, Literal

import torch
import triton
import triton.language as tl

Implementation = Literal["triton", "reference"]

INTERPRETED: Final[bool] = bool(triton.knobs.runtime.interpret)
TRITON_DTYPES: Final = frozenset({torch.float32, torch.bfloat16, torch.float16})
# Triton 3.10 turns the fusing of multiply and add off unless a launch says otherwise.
LAUNCH_OPTIONS: Final[dict[str, Any]] = {"enable_fp_fusion": True}
MULTIPROCESSORS_WITHOUT_DEVICE: Final = 132  # H100 and H200 SXM

_forced: ContextVar[Implementation | None] = ContextVar("forced_implementation", default=None)


def choose(device_type: str, dtype: torch.dtype, *, interpreted: bool) -> Implementation:
    """The rule, free of state: ``device_type`` is that of ``torch.device.type``."""
    if dtype not in TRITON_DTYPES:
        return "reference"
    return "triton" if interpreted or device_type == "cuda" else "reference"


def use_triton(tensor: torch.Tensor) -> bool:
    """Whether the operator whose main input is ``tensor`` runs its Triton kernel."""
    chosen = _forced.get() or choose(tensor.device.type, tensor.dtype, interpreted=INTERPRETED)
    return chosen == "triton"


@contextmanager
def forced(implementation: Implementation) -> Iterator[None]:
    """Every operator called inside takes ``implementation``, whatever its device.

    For comparing the two on one device, and for compiling without a device.
    """
    token = _forced.set(implementation)
    try:
        yield
    finally:
        _forced.reset(token)


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """The type in which operands of ``dtype`` enter a matrix product.

    The interpreter keeps bf16 as integer bits and would multiply those, so it gets fp32.
    """
    if INTERPRETED or dtype == torch.float32:
        return tl.float32
    return {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]


def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of ``device``; those of an H100 where there is none."""
    if device.type != "cuda":
        return MULTIPROCESSORS_WITHOUT_DEVICE
    return _multiprocessors(device.index if device.index is not None else 0)


@lru_cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count

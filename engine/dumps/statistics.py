"""What is said of a tensor at once, while it is still in the step that made it.

Path: capture.py -> here -> ``Record.statistics``.
"""

from __future__ import annotations

import hashlib
import math

import torch

from engine.dumps.store import HISTOGRAM_BINS, Statistics

DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
WIDE = (torch.float64, torch.int64)


def kept_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the CPU; a type that safetensors does not know becomes float32."""
    tensor = tensor.detach()
    if tensor.dtype not in DTYPE_NAMES:
        tensor = tensor.real.float()
    return tensor.to("cpu", copy=True).contiguous()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    data: memoryview = tensor.flatten().view(torch.uint8).numpy().data
    return data


def describe(tensor: torch.Tensor) -> Statistics:
    """Statistics of a contiguous CPU tensor. Needs about 8 bytes per element beside it."""
    values = tensor.flatten().to(torch.float64 if tensor.dtype in WIDE else torch.float32)
    finite = values.isfinite()
    good = values if finite.all() else values[finite]
    known = good.numel() > 0
    low, high = (float(end) for end in torch.aminmax(good)) if known else (math.nan, math.nan)
    mean = float(good.mean(dtype=torch.float64)) if known else math.nan
    spread = float(torch.linalg.vector_norm(good - mean, dtype=torch.float64))
    return Statistics(
        shape=list(tensor.shape),
        dtype=DTYPE_NAMES[tensor.dtype],
        count=tensor.numel(),
        min=low if known else None,
        max=high if known else None,
        mean=mean if known else None,
        std=spread / math.sqrt(good.numel()) if known else None,
        l2=float(torch.linalg.vector_norm(good, dtype=torch.float64)),
        nan=int(values.isnan().sum()),
        inf=int(values.isinf().sum()),
        histogram=_histogram(good, low, high),
        sha256=hashlib.sha256(bytes_of(tensor)).hexdigest(),
    )


def _histogram(good: torch.Tensor, low: float, high: float) -> list[int]:
    """Counts of finite values in equal bins from ``low`` to ``high``, both inside."""
    if not low < high:
        return [good.numel()] + [0] * (HISTOGRAM_BINS - 1)
    if high / 2 - low / 2 > torch.finfo(good.dtype).max / (4 * HISTOGRAM_BINS):
        good, low, high = good / 1024, low / 1024, high / 1024  # or histc overflows inside
    counts = torch.histc(good, bins=HISTOGRAM_BINS, min=low, max=high)
    return [int(count) for count in counts.tolist()]

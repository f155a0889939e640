"""The gated activations between the two halves of an MLP: SiLU (Llama) and tanh-GELU (Gemma).

Path: engine/model/native.py, after the gate and up projections.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.dispatch import LAUNCH_OPTIONS, use_triton

BLOCK = 1024
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)  # Hendrycks and Gimpel, "Gaussian Error Linear Units", section 2


def silu_and_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate * sigmoid(gate) * up in fp32, rounded once to the input dtype."""
    wide = gate.float()
    return (wide * torch.sigmoid(wide) * up.float()).to(gate.dtype)


def gelu_tanh_and_mul_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with GELU's tanh form in fp32, rounded once to the input dtype."""
    wide = gate.float()
    return (torch.nn.functional.gelu(wide, approximate="tanh") * up.float()).to(gate.dtype)


@triton.jit
def _gated_kernel(
    gate_ptr,
    up_ptr,
    out_ptr,
    width,
    gate_stride,
    up_stride,
    GELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < width
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=live, other=0.0).to(tl.float32)
    if GELU:
        # (1 + tanh(z)) / 2 is sigmoid(2 z)
        inner = SQRT_2_OVER_PI * (gate + CUBIC * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)
    else:
        active = gate * tl.sigmoid(gate)
    out = (active * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=live)


def silu_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [tokens, width] each; contiguous result of the same shape.

    Both may be halves of one fused projection (only the last axis must be dense). Reads 2n and
    writes n elements; bound by memory bandwidth. ValueError if the shapes or dtypes differ.
    """
    _check(gate, up)
    if not use_triton(gate):
        return silu_and_mul_reference(gate, up)
    return _launch(gate, up, gelu=False)


def gelu_tanh_and_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gelu(gate, tanh form) * up; shapes, bytes and errors as in ``silu_and_mul``."""
    _check(gate, up)
    if not use_triton(gate):
        return gelu_tanh_and_mul_reference(gate, up)
    return _launch(gate, up, gelu=True)


def _check(gate: torch.Tensor, up: torch.Tensor) -> None:
    if gate.dim() != 2 or gate.shape != up.shape:
        raise ValueError(
            "gate and up must both be [tokens, width], got "
            f"{tuple(gate.shape)} and {tuple(up.shape)}"
        )
    if gate.dtype != up.dtype:
        raise ValueError(f"gate and up must have one dtype, got {gate.dtype} and {up.dtype}")
    if gate.stride(1) != 1 or up.stride(1) != 1:
        raise ValueError(
            f"the last axis must be dense, the strides are {gate.stride()} and {up.stride()}"
        )


def _launch(gate: torch.Tensor, up: torch.Tensor, *, gelu: bool) -> torch.Tensor:
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    rows, width = gate.shape
    if out.numel() == 0:
        return out
    _gated_kernel[(rows, triton.cdiv(width, BLOCK))](
        gate,
        up,
        out,
        width,
        gate.stride(0),
        up.stride(0),
        GELU=gelu,
        BLOCK=BLOCK,
        num_warps=4,
        **LAUNCH_OPTIONS,
    )
    return out

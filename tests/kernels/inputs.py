"""Inputs and tolerances that the kernel tests and the GPU check share."""

from __future__ import annotations

import torch

from kernels.attention_tile import PagedContext

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Largest difference from the reference, relative to max(1, |reference|).
TOLERANCE = {
    # both sum in fp32, in different orders: about sqrt(4096) roundings of 2^-24
    torch.float32: 1e-5,
    # the result is rounded once, possibly to the other neighbour: one unit in the last place, which
    # is also what Triton's interpreter loses, because it truncates where a GPU rounds
    torch.bfloat16: 2.0**-7,
    torch.float16: 2.0**-10,
}


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, *, roundings: int = 1, what: str = ""
) -> None:
    """Within ``roundings`` units of TOLERANCE of the tensors' dtype."""
    assert actual.shape == expected.shape, f"{what}: {actual.shape} is not {expected.shape}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} is not {expected.dtype}"
    error = relative_error(actual, expected)
    bound = TOLERANCE.get(actual.dtype, 0.0) * roundings
    assert error <= bound, f"{what}: error {error:.3g} is more than {bound:.3g}"


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """max |actual - expected| / max(1, |expected|); NaN counts as infinite."""
    wide, right = actual.double(), expected.double()
    error = (wide - right).abs() / right.abs().clamp(min=1.0)
    return float(error.nan_to_num(nan=torch.inf).amax()) if error.numel() else 0.0


def normal(
    *shape: int, dtype: torch.dtype, seed: int = 0, device: str | torch.device = "cpu"
) -> torch.Tensor:
    """Standard normal numbers, made on ``device``: large ones take seconds on a CPU."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + sum(shape))
    return torch.randn(shape, generator=generator, device=device).to(dtype)


def middle_of_share(
    logits: torch.Tensor, tokens: torch.Tensor, temperature: torch.Tensor
) -> torch.Tensor:
    """The uniform number in the middle of each token's share of its row; temperature 0 counts as 1.

    Rounding moves the ends of a share, so only its middle draws one token for certain.
    """
    scale = torch.where(temperature == 0, 1.0, temperature).double()[:, None]
    weights = (logits.double() / scale).softmax(dim=1)
    upper = weights.cumsum(dim=1).gather(1, tokens[:, None])[:, 0]
    return (upper - weights.gather(1, tokens[:, None])[:, 0] / 2).float()


def paged_context(
    lengths: list[int],
    *,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> PagedContext:
    """Contexts in shuffled blocks. Every slot that no context owns is NaN, and so is what the
    entries of a table beyond its length point to, so that a read too many shows."""
    generator = torch.Generator(device).manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    total = sum(blocks) + 1
    order = torch.randperm(total, generator=generator, device=device).to(torch.int32)
    width = max([*blocks, 1]) + 1
    tables = order[-1].repeat(len(lengths), width)
    shape = (total * block_size, kv_heads, dim)
    key, value = (torch.full(shape, torch.nan, dtype=dtype, device=device) for _ in range(2))
    taken = 0
    for sequence, (length, count) in enumerate(zip(lengths, blocks, strict=True)):
        tables[sequence, :count] = order[taken : taken + count]
        taken += count
        tokens = torch.arange(length, device=device)
        slots = tables[sequence, tokens // block_size].long() * block_size + tokens % block_size
        for cache in (key, value):
            context = torch.randn((length, *shape[1:]), generator=generator, device=device)
            cache[slots] = context.to(dtype)
    return PagedContext(
        key=key,
        value=value,
        block_tables=tables,
        lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_size=block_size,
    )

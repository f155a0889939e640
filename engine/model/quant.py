"""What the quantised weight forms do to a weight: the definition, and the eager decoder's form.

Path: native.py -> here for the eager decoder; csrc/pack.hpp packs the same numbers. Groups of 32
input columns share a scale and a minimum, both fp16: ``scale * code + minimum``. The last group may
be short. In C++ activations are rounded to int8 per group as well, which is not part of this.
"""

from __future__ import annotations

import torch
from torch.nn import functional

GROUP = 32


def int4(weight: torch.Tensor) -> torch.Tensor:
    """A weight [rows, columns] as codes 0..15 make it, in its own dtype.

    Codes are the values rounded to 16 steps between the smallest and the largest of their group;
    scale and minimum are then fitted by least squares, so what a 4-bit format made comes back.
    """
    values, mask = _groups(weight)
    low = values.masked_fill(~mask, torch.inf).amin(-1, keepdim=True)
    high = values.masked_fill(~mask, -torch.inf).amax(-1, keepdim=True)
    step = (high - low) / 15.0
    codes = torch.where(step > 0, ((values - low) / step).round(), 0.0).clamp(0, 15) * mask
    scale, minimum = _fit(values * mask, codes, mask, step, low)
    return _join(_half(scale) * codes + _half(minimum), weight)


def int8(weight: torch.Tensor) -> torch.Tensor:
    """A weight as codes -127..127 times the scale of their group make it, in its own dtype."""
    values, mask = _groups(weight)
    scale = _half((values * mask).abs().amax(-1, keepdim=True) / 127.0)
    codes = torch.where(scale > 0, (values / scale).round(), 0.0).clamp(-127, 127)
    return _join(scale * codes, weight)


def _groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 [rows, groups, 32], and which of them are values and not padding."""
    missing = -weight.shape[1] % GROUP
    padded = functional.pad(weight.float(), (0, missing)).view(len(weight), -1, GROUP)
    present = torch.arange(padded.shape[1] * GROUP) < weight.shape[1]
    return padded, present.view(1, -1, GROUP)


def _fit(
    values: torch.Tensor,
    codes: torch.Tensor,
    mask: torch.Tensor,
    step: torch.Tensor,
    low: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and minimum of least squared error; those given where all codes are equal."""
    count = mask.double().sum(-1, keepdim=True)
    wide, wide_codes = values.double(), codes.double()
    sums, code_sums = wide.sum(-1, keepdim=True), wide_codes.sum(-1, keepdim=True)
    spread = count * wide_codes.square().sum(-1, keepdim=True) - code_sums.square()
    products = (wide * wide_codes).sum(-1, keepdim=True)
    slope = ((count * products - code_sums * sums) / spread.clamp(min=1.0)).float()
    offset = ((sums - slope.double() * code_sums) / count).float()
    return torch.where(spread > 0, slope, step), torch.where(spread > 0, offset, low)


def _half(values: torch.Tensor) -> torch.Tensor:
    return values.half().float()


def _join(groups: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return groups.flatten(1)[:, : like.shape[1]].to(like.dtype)
